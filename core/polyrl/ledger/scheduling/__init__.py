"""Which engine generates which sample, and when that changes.

    cost          what a sample costs on an engine: one formula for all decisions
    placement     waiting samples to engines with room
    arrivals      how much who has new weights first gets of that
    rebalance     running samples to where they cost less
    window        when the trainer's own devices generate, and when they learn
    recalls       how a sample leaves a healthy engine
    notice        how much of a notice is generated in
    moves         how an assignment ends; engines that fail pause
    leases        all deadlines, in one `tick`

Imports batching, never messages.
"""
