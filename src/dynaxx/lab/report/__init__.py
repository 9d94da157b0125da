"""`dynaxx report`: one HTML page from the results in a folder."""
