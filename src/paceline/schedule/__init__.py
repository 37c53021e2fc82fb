"""Pipeline schedules as data: made, printed, parsed, checked, measured. No torch."""
