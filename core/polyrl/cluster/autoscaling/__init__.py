"""How many rollouts there should be: steps are judged, gaps measured, a wish made.

Refuses to hold: which pods make up that number (see `fleet`). Read next: `wish`.
"""
