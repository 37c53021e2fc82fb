"""Ours beside the best of the others, interleaved in one run. The only room that may import peers."""
