"""What a run is, as values: task, arm, scale, seeds and settings."""
