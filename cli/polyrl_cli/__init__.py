"""The `polyrl` command: validates and runs manifests, locally as processes or on a cluster, and looks into runs."""
