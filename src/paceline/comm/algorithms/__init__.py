"""Collectives made of messages: ring, trees, halving-doubling, hierarchical."""
