"""The course: exercises and their checks, and the page with sliders of ``paceline learn play``.

Readers take it from ``paceline.learn`` and ``paceline learn``; nothing else of the package imports it.
"""
