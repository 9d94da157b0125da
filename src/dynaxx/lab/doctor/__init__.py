# SPDX-License-Identifier: Apache-2.0
"""`dynaxx doctor`: what this machine can serve, and whether it computes the right thing."""
