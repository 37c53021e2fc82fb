"""``paceline train`` on one GPU beside the best loops that a user would write, and beside other trainers."""
