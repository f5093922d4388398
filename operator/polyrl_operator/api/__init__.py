"""The Kubernetes API, for the operator and for the commands that reach a cluster (`polyrl_cli.remote`).

    kinds     the kinds of objects, their URLs, and the permission that a request needs
    client    get, list in pages, follow, create, apply, patch, delete; retries; the API server's clock
    connect   credentials, and a session for long streams

Nothing here imports the rest of the operator.
"""
