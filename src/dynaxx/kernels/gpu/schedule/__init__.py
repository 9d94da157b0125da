"""Split long rows and columns into parts, and combine what the parts computed."""
