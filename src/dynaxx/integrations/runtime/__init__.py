# SPDX-License-Identifier: Apache-2.0
"""What every engine adapter shares: paged layers, counting, guarding, background work."""
