"""Parity: does the distributed run compute what one process would? Behind ``paceline.verify`` and its verb."""
