"""Measures the present device and writes it down as an entry of the catalog."""
