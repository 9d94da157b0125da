# SPDX-License-Identifier: Apache-2.0
"""`dynaxx tune` as one command: its steps, its result, and a border raised until the speed holds."""
