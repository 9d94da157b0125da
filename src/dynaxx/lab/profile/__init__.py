"""`dynaxx profile`: where the time goes, and whether sparse attention is worth it."""
