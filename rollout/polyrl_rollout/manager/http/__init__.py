"""The manager's HTTP side.

    api         the aiohttp application: paths, bodies, the token, HTTPS
    control     what it serves: status and its changes, waits, drains
    metrics     the status and the sockets' traffic for Prometheus
    openapi     the OpenAPI document, kept in docs/reference/manager-api.json

`server` imports `api`, `control` and `metrics`; nothing here imports `server`.
"""
