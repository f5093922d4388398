{{/* What the operator may do in a namespace whose jobs it looks after: one rule per kind, each with its reason. */}}
{{- define "polyrl.jobRules" -}}
# Jobs are read, and deleted when their ttlSecondsAfterFinished is over. Their spec is never written.
- apiGroups: [polyrl.dev]
  resources: [polyrljobs]
  verbs: [get, list, watch, delete]
# What is reported.
- apiGroups: [polyrl.dev]
  resources: [polyrljobs/status]
  verbs: [patch]
# Children name their job with blockOwnerDeletion; where OwnerReferencesPermissionEnforcement is on, that needs this.
- apiGroups: [polyrl.dev]
  resources: [polyrljobs/finalizers]
  verbs: [update]
# Managers and rollouts are bare pods: made, annotated once when their end is near, deleted.
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list, watch, create, patch, delete]
# The trainer is an Indexed Job; suspending a job suspends it, and one whose template was changed meanwhile is made anew.
- apiGroups: [batch]
  resources: [jobs]
  verbs: [get, list, watch, create, patch, delete]
# A run's addresses; changed when the manager's port is another.
- apiGroups: [""]
  resources: [services]
  verbs: [get, list, create, patch]
# A run's configuration, which a changed spec makes anew under a new name; volumes for checkpoints and the journal; an account
# for its workers that may do nothing, and of which no pod has a token.
- apiGroups: [""]
  resources: [configmaps, persistentvolumeclaims, serviceaccounts]
  verbs: [get, list, create]
# Each job's keys: made once, read by name to speak with the job's manager and to make each role's and rollout's of. Never listed.
# Patched: the manager's alone, whose certificate is renewed every week.
- apiGroups: [""]
  resources: [secrets]
  verbs: [get, create, patch]
# Voluntary evictions spare the trainer; deleted when a job no longer asks for it.
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, list, create, patch, delete]
# Each job is isolated; deleted when one asks for networkPolicy.mode None.
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [get, list, create, patch, delete]
# Every decision becomes an Event; repeated ones are counted up in place.
- apiGroups: [events.k8s.io]
  resources: [events]
  verbs: [create, patch]
{{- end -}}

{{/* Cluster-scoped, read only: where notices of preemption appear first. */}}
{{- define "polyrl.nodeRules" -}}
# Taints, readiness and shutdown of the nodes that run rollouts.
- apiGroups: [""]
  resources: [nodes]
  verbs: [list, watch]
# Karpenter deletes a NodeClaim before it drains its node.
- apiGroups: [karpenter.sh]
  resources: [nodeclaims]
  verbs: [list, watch]
{{- end -}}
