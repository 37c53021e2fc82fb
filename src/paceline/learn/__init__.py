"""The course: its exercises and their checks. Lessons: ``docs/learn/``; as notebooks: ``notebooks/``."""
