"""onebasin: bring independently trained neural networks into one basin of the loss landscape."""
