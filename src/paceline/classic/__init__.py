"""The class names of the documents that the product grew from, on top of everything else."""
