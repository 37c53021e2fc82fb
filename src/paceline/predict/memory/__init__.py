"""What a rank needs of memory, by category, before a run starts. No torch in here."""
