"""`dynaxx validate`: compare a model under a policy with the dense model."""
