"""One file a task: its data, its scales and how a batch is made."""
