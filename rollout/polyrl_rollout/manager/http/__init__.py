"""The manager's HTTP side.

    api         paths, bodies, the token, HTTPS; the status and its changes, waits, drains
    metrics     the status and the sockets' traffic for Prometheus
    openapi     the OpenAPI document, kept in docs/reference/manager-api.json

`server` imports `api` and `metrics`; nothing here imports `server`.
"""
