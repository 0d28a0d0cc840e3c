"""Texts and trained models that read them, as the commands take them from a user."""
