"""The `headwise` command."""
