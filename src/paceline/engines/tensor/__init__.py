"""Layers that several ranks share."""
