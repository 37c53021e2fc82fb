"""What we have: who talks to whom in a collective, and what it costs on given links. No torch."""
