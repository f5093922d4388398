"""How many rollouts there should be: steps are judged, gaps measured, a wish made."""
