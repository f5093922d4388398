"""The manager: one process per job that carries the ledger's decisions between agents, trainer and operator.

    agents  --DEALER/ROUTER-->  +---------+  <--ROUTER/DEALER--  trainer
                                | ledger  |
    operator, CLI  --HTTP-->    +---------+  --events-->  the journal

One asyncio loop, one thread. Nobody in here waits for a peer: a frame in gives the ledger's effects out, and a send
that would block is counted and dropped, because leases and the peers' own repetition already cover a lost frame.

    server      the wiring: two sockets, the HTTP API, one timer around the ledger
    peers       the two ROUTERs: who may connect, which frames of whom become messages
    journal     each durable event in SQLite before a message that depends on it leaves
    group_commit  when it is synced
    api         paths, bodies, the token, HTTPS; the status and its changes, waits, drains
    history     the trainer's rows, samples to read and what happened to engines, bounded, in memory
    page        the run as an HTML page
    metrics     the status and the sockets' traffic for Prometheus
    openapi     the API's OpenAPI document, kept in docs/reference/manager-api.json
    __main__    `python -m polyrl_rollout.manager`: files and flags in, an exit code out

Others start the process; only tests and benchmarks import `server.Manager`.
"""
