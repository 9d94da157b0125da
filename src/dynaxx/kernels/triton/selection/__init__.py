"""Block scores and block selection in Triton."""
