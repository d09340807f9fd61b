"""One method of finding a permutation per file."""
