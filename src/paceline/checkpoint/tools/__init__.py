"""What is done with checkpoints from the outside: listed, verified, compared, cut anew, sent out and taken in."""
