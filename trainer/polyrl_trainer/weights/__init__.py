"""The sending side of weights: `publisher` numbers what changed, and serves it to agents as chunks.

`app` and `loops` import it. `polyrl_rollout.weights` receives; both go by `polyrl.weights` and `polyrl.wire`.
"""
