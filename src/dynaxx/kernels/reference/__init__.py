"""The definition of every operation, in torch."""
