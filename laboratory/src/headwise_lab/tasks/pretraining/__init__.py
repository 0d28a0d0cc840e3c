"""ELECTRA pre-training."""
