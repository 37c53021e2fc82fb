"""What makes a model fit: activation checkpointing, offload to the host, and the search for a batch that fits."""
