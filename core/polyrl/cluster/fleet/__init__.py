"""Which pods there should be: rollouts of both pools, one manager, one trainer; who comes, and who goes first."""
