"""Ranks whose links are emulated on one real device."""
