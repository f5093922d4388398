"""The Kubernetes API, for the operator and for the commands that reach a cluster (`polyrl_cli.remote`).

    kinds         the kinds of objects and their URLs
    client        get, list in pages, create, apply, patch, delete; retries; the API server's clock
    connect       credentials, and a session for long streams
    permissions   the permission that each request needs, counted

Nothing here imports the rest of the operator.
"""
