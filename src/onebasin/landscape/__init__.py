"""The loss between models: lines and planes, and the statistics of mixed networks."""
