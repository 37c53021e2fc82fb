"""What we will do, and what it will take: a model of a training step, and how well it does on published measurements."""
