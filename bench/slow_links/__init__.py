"""Collectives on links whose speed is known: hosts as network namespaces, joined by cables that are shaped."""
