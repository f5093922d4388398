"""A run on a cluster as the user sees it, with the user's own rights. Imports the operator's `api` package alone.

cluster          the cluster that kubeconfig and flags name: objects, watches, logs, WebSockets
run              `polyrl run --on kubernetes`: apply a manifest and follow the job
code_config_map  the ConfigMap of the user's code, which goes along
status, logs     `polyrl status` and `polyrl logs`
chaos, exec      `polyrl chaos --on kubernetes`
"""
