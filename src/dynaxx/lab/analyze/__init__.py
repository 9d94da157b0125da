# SPDX-License-Identifier: Apache-2.0
"""`dynaxx analyze`: where each head attends, and which rule would keep that."""
