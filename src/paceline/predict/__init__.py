"""What a run will take: memory and time. No torch."""
