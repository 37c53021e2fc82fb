"""Ranks that share each sequence: how it is cut, and attention over all of it."""
