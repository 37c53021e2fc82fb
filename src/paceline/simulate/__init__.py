"""The same program on virtual clocks: a training of N ranks in one process, with the times of another machine."""
