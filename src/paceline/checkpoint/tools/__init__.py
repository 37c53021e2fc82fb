"""What is done with checkpoints from the outside: listed, verified, compared, cut anew, sent out and taken in.

Nothing here needs the model's code, a device, or more memory than windows of 8 MiB, or than the largest tensor.
"""
