"""A training on virtual ranks with clocks."""
