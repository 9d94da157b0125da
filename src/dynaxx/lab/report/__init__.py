# SPDX-License-Identifier: Apache-2.0
"""`dynaxx report`: one HTML page from the results in a folder."""
