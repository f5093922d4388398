"""The `polyrl` command and the local runner.

    start       where the command begins, before anything is loaded
    app         the command line: exit statuses, and which commands there are
    commands    their flags, and which module does what is asked for
    manifests   from a YAML file to a valid job, or to sentences about what is wrong
    local       a run as processes on this machine
    report      what such a run shows while it goes on and at its end
    remote      a run on a cluster
    chaos       faults on purpose, here and on a cluster
    model       export, generate: what a run has trained
    inspection  why, explain, check: a run's state and history from its journal
    page        report: a run as one HTML file

    extras      which packages a command needs beyond the core, said in one sentence
    environment which variables a process of ours gets

Above it there is nothing: no other package imports it. It imports `polyrl`, and of the operator `secret`,
`managers` and `api`.
"""
