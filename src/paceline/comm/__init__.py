"""How bytes move: the communicator seam and its backends. The only room that imports torch.distributed."""
