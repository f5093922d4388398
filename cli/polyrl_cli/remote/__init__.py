"""A run on a cluster as the user sees it, with the user's own rights. Imports the operator's `api` package alone.

cluster          the cluster that kubeconfig and flags name: objects, watches, logs, WebSockets
run              `polyrl run --on kubernetes`: apply a manifest with the ConfigMap of its code, and follow the job
status, logs     `polyrl status` and `polyrl logs`
execution        a command run in a container, and what it writes
chaos            `polyrl chaos --on kubernetes`
manager, ask_in_container   the job's manager, asked from inside its pod
top              `polyrl top --on kubernetes`
reader_pod, read_in_container   what `polyrl get` reads a run's folder by
"""
