"""Which engine generates which sample, and when that changes.

    placement     waiting samples to engines with room; when the trainer's own devices generate
    rebalance     running samples to engines that are faster
    recalls       how a sample leaves a healthy engine; what leaves a draining one
    moves         how an assignment ends; engines that fail pause
    leases        all deadlines, in one `tick`
    stragglers    engines so slow that they hold up a step

Imports batching, never messages.
"""
