"""The laboratory: tasks, models and comparisons on top of the library, which never imports it."""
