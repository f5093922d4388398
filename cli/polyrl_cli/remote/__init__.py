"""A run on a cluster as the user sees it: apply, follow, logs, faults. Imports `polyrl_operator.api`."""
