"""The course: its exercises and their checks. Lessons: ``docs/learn/``; as notebooks: ``notebooks/``.

``check("3.2", answer)`` says whether an answer is right, ``hint("3.2")`` prints a hint, ``ask("3.2")`` the exercise.
"""

from paceline_course.course import ask, check, hint

__all__ = ["ask", "check", "hint"]
