# SPDX-License-Identifier: Apache-2.0
"""`dynaxx bench`: test the kernels, then time them beside their peers."""
