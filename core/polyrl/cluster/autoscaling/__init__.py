"""How many rollouts are desired.

    gap              a size from the times of one step, steadied by windows, bounds and a cooldown
    scale_decision   observes steps, and decides: by the gap, by an autoscaler or by the user

Which pods make up that number is decided in `fleet`.
"""
