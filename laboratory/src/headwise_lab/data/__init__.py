"""Reading, splitting, tokenizing and batching text."""
