"""What Paceline's authors measure: ``python bench`` lists it. A user's own benchmarks are ``paceline bench``."""
