"""Text of any size as shards of packed rows of token ids: how they are written, read, and streamed in batches."""
