"""Role masks for the texts of a task."""
