"""`dynaxx bench`: test the kernels, then time them beside their peers."""
