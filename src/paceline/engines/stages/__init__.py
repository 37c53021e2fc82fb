"""A model cut into the stages of a pipeline."""
