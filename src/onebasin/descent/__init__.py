"""Steps of an optimiser, recorded as CUDA graphs where that is possible."""
