"""What we will do, and what it will take: a model of a training step, scored on published measurements."""
