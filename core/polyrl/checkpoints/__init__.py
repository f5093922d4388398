"""Whether a checkpoint is begun in the time that is left."""
