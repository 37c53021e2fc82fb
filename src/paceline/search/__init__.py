"""The best layout: candidates, the search, the plan that follows. No torch."""
