# SPDX-License-Identifier: Apache-2.0
"""`dynaxx report`: write the results in a folder as one HTML page."""
