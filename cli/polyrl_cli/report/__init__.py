"""What a run shows while it goes on and at its end: progress, summary, picture."""
