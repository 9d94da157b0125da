"""`dynaxx analyze`: where each head attends, and which rule would keep that."""
