# SPDX-License-Identifier: Apache-2.0
"""`dynaxx doctor`: show what this machine can serve, and check its results."""
