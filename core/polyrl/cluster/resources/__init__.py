"""The children of a job as plain Kubernetes objects: pure functions of the manifest and the operator's settings.

owner                       the job that owns them, content hashes, the operator's settings
fixed, config               ServiceAccount, Services, claims, budget, network rules; the ConfigMap
manager, rollout, trainer   pods, and the trainer's Job
pod, template, placement    what pods share: volumes, the merge with a user's template, node requirements
checks                      what a manifest may say and this version cannot run
"""
