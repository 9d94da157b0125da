"""Adapters to other libraries, through their official extension points only."""
