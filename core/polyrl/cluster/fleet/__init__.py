"""Which pods there should be: rollouts of both pools, one manager, one trainer; who comes, and who goes first.

Refuses to hold: how many rollouts are wished (see `size`). Read next: `fleet_plan`.
"""
