"""What went wrong: judgement on ledgers, lateness and deaths, as pure functions without torch."""
