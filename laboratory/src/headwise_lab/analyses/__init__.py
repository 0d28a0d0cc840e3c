"""What is computed after a run."""
