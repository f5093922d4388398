"""Which engine generates which sample, and when that changes: placement, rebalancing, drains, leases, stragglers."""
