"""What is seen of a job: raw objects of the API become facts, facts signs, and signs the standing of each rollout.

Refuses to hold: what follows from it (see `size`, `fleet`, `story`). Read next: `facts`, then `look`, `rollouts`.
"""
