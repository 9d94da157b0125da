# SPDX-License-Identifier: Apache-2.0
"""`dynaxx tune` and `dynaxx retune`: find the sparsest policy that keeps quality, and renew it."""
