"""Recipes: all stages from a corpus to a measured guard, run by one command that resumes."""
