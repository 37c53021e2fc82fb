"""One rank of a world of any size, on tensors without values."""
