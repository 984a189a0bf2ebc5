"""Training: one loop for every model, run directories, and intervals."""
