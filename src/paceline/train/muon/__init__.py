"""Muon: momentum whose matrices are orthogonalised, each once, on one of the ranks that share it."""
