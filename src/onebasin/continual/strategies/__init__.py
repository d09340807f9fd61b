"""One strategy of continual learning per file."""
