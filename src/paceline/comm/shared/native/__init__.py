"""The part of shared memory that is written in C++: built once on each machine, and done without where it cannot be."""
