"""Real ranks under torch's profiler: one time line of all ranks, and what it says."""
