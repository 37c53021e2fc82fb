"""Data: what a sample is, in which order samples come (``order.py``), how a rank reads its share (``loader.py``)."""
