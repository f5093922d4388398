"""The manager: one process per job that carries the ledger's decisions between agents, trainer and operator.

    agents  --DEALER/ROUTER-->  +---------+  <--ROUTER/DEALER--  trainer
                                | ledger  |
    operator, CLI  --HTTP-->    +---------+  --events-->  consumers (a journal)

One asyncio loop, one thread. Nobody in here waits for a peer: a frame in gives ledger outcomes out, and a send that
would block is counted and dropped, because leases and the peers' own repetition already cover a lost frame.
Read next: `server` (the wiring), `sockets` (one ROUTER), `agents` and `trainer_desk` (who may say what), `http_api`.
"""
