"""The classes that the product grew from: a trainer, a simulated one, a monitor, an analyzer; on top of all else.

Scripts take them from ``paceline.classic``, and from ``paceline`` if they were written before.
"""
