"""Gradients that are reduced together."""
