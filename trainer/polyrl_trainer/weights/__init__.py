"""The sending side of weights: `publisher` numbers what changed, and serves it to agents as chunks.

`app` and `loops` import it. The receiving side is `polyrl_rollout.weights`; both go by `polyrl.weights` and `polyrl.wire`.
"""
