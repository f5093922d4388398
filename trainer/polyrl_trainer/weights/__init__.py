"""The sending side of weights; `app` and `loops` import it. `polyrl_rollout.weights` receives.

policy_versions    which number a changed policy gets
publisher          a version's bytes: copied, kept, given
forms              what of them travels: all, or what changed
images             the memory that they lie in
lender             the copies of chunks that receivers read for themselves, by Mooncake
server             sockets and threads that answer receivers, by `polyrl.wire.serving`
"""
