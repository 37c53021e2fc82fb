"""Step time by formulas."""
