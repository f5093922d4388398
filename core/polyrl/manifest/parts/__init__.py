"""The longer sections of a recipe, and what several fields share: sources of files, the shape of a pod."""
