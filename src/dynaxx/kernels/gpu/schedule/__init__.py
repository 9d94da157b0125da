# SPDX-License-Identifier: Apache-2.0
"""Split long rows and columns into parts, and combine what the parts computed."""
