"""PolyRL's core: what is decided, as values.

Pure on purpose: no sockets, no cluster, no tensors, no clock (`now` is an argument). The same deciders run in
production, in random-schedule tests and in the simulator; no rule has a second copy for any of them. The exceptions
are `parent_death_signal` and `interpreter`, which processes call first thing, and `forks`, which makes processes.

    sample      the nouns: group, sample, response        errors   messages to users, and exit codes
    manifest    PolyRLJob: models, rules, CRD             status   what a manager reports
    wire        the messages between processes            control  the manager's HTTP API as values
    ledger      where every sample lives                  weights  versions, manifests, chunks
    cluster     one job on Kubernetes, reconciled         keys     key files of one run
    history     what a run leaves to be read             memory   what a job takes of a GPU
    local       the workers of one machine, planned       worker   how a worker's process is started, and how it ends
    page        a run as one HTML page                    engines  what an SGLang server may be ordered to do
    checkpoints whether a last one fits into a trainer's grace

import-linter holds who may import whom: cluster, ledger and local above, then memory, then wire, worker and control,
then history, then the rest. Everybody may import core; core imports nobody.
"""
