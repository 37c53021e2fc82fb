"""What we will do, as values: the layout of a run, its rules and its plan. No torch."""
