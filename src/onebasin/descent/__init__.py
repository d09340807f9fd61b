"""Steps of an optimiser, captured in CUDA graphs where that is possible."""
