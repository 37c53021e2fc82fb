"""The real engines on meta tensors: what one rank of any world does in a step, written down."""
