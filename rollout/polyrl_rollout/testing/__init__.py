"""Test kit of rollouts: what stands for the parts of a run that a test does not have. No image carries it.

- `stage`: a ledger driven by hand, one event per call. `flow`: a ledger between engines of known speed.
- `simulation`: whole runs in virtual time, under random faults (`run`), or every state of a small one (`explore`).
- `fake_agent`: the agent's protocol over a real socket. `fake_engine`: the engine port without a model.
- `fake_metadata`: the clouds' metadata services.

Simulated agents drive the real `polyrl_rollout.agent.protocol`, but for two: `fake_agent`, which makes and sends the
tokens of all its assignments as columns, so that a benchmark measures the manager and not the fake; and the peers of
`explore`, whose whole state must be a small value that is copied, compared and hashed at every step.
"""
