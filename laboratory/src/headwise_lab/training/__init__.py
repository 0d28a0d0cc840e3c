"""One run: model, method, optimizer and Trainer."""
