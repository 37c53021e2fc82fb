"""Step time by replaying what an engine issued."""
