"""Faults on purpose: the same ones at the same steps every time, and what the run's own recovery makes of them."""
