"""The children of a job as plain Kubernetes objects: pure functions of the manifest and the operator's settings.

owner                      the job that owns them, content hashes, the operator's settings
fixed                      ServiceAccount, ConfigMap, Services, claims, budget, network rules
workers                    pods of the manager and of rollouts, the trainer's Job
pod, template, placement   what pods share: volumes, the merge with a user's template, node requirements
"""
