"""Fine-tuning on GLUE."""
