"""The Kubernetes API: client, kinds, connection, server's clock, patches.

`polyrl_cli.remote` may import it; nothing here imports the rest of the operator.
"""
