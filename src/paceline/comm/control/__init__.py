"""The control connections of a run: a small store whose every message is authenticated, and read as bounded JSON."""
