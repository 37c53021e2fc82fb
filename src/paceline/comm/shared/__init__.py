"""Ranks of one host that talk through shared memory."""
