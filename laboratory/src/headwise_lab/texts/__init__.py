"""Sets of labeled texts and pairs: read, cut into words, cached, split and made into batches."""
