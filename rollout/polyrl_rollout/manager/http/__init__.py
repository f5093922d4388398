"""The manager's HTTP API: status, drain, waits, metrics, and its OpenAPI document."""
