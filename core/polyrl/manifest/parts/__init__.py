"""Parts of a recipe that are read by themselves."""
