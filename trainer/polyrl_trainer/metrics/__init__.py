"""Where step metrics go, and how their history is taken back to a checkpoint."""
