# SPDX-License-Identifier: Apache-2.0
"""`dynaxx validate`: compare a model under a policy with the dense model."""
