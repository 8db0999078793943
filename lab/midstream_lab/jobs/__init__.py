"""The simulator's own jobs: their shapes, their operators and sources, and the results that they must have."""
