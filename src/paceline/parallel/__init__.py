"""The engines: one readable file per strategy, combined in ``apply.py``."""
