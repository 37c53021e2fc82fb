"""What is done with checkpoints from the outside: listed, shown, verified, compared, cut anew, sent out and taken in.

Nothing here needs the model's code, a device or more memory than some windows of 8 MiB, or the largest tensor where a
format wants whole ones. This room knows checkpoints and their files; engines and trainers know nothing of it.
"""
