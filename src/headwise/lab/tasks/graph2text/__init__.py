"""Text from knowledge graphs."""
