# SPDX-License-Identifier: Apache-2.0
"""`dynaxx report`: write the results in a folder as one HTML page.

To add a column to a table, add its figure to the section's function in `sections.py`, and its heading and cell to
`templates/report.html.j2`.
"""
