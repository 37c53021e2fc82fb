"""Every operation of a rank, written down for whoever judges a hang."""
