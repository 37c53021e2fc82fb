"""One rank of a run on tensors without values."""
