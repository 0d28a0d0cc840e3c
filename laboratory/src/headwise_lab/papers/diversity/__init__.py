"""Studies of our own: doses, diversity, and smaller models."""
