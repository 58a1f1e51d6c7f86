"""Audit: is the picture safe, what is wrong with it, and where."""
