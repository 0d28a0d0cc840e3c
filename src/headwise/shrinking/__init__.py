"""Models with fewer heads: heads removed, key and value heads merged."""
