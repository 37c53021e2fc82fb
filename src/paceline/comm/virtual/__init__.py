"""Ranks that take turns in one process."""
