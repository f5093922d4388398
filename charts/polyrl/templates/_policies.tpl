{{/* What two policies ask of pods, in CEL over `variables.templates`: metadata and spec of each. */}}
{{- define "polyrl.podVariables" -}}
- name: pods
  expression: variables.templates.filter(t, has(t.spec)).map(t, t.spec)
- name: containers
  expression: >-
    variables.pods.map(p, (has(p.containers) ? p.containers : []) + (has(p.initContainers) ? p.initContainers : []))
- name: security
  expression: >-
    variables.containers.map(l, l.filter(c, has(c.securityContext)).map(c, c.securityContext))
    + [variables.pods.filter(p, has(p.securityContext)).map(p, p.securityContext)]
{{- end -}}

{{/* Nothing of the host's but the pod's own place on it. */}}
{{- define "polyrl.hostRule" -}}
variables.pods.all(p, !(has(p.hostNetwork) && p.hostNetwork) && !(has(p.hostPID) && p.hostPID)
&& !(has(p.hostIPC) && p.hostIPC) && !has(p.nodeName))
&& variables.containers.all(l, l.all(c, !has(c.ports) || c.ports.all(o, !has(o.hostPort) || o.hostPort == 0)))
{{- range $handler := list "livenessProbe" "readinessProbe" "startupProbe" "lifecycle.postStart" "lifecycle.preStop" }}
&& variables.containers.all(l, l.all(c,
{{- if hasPrefix "lifecycle." $handler }} !has(c.lifecycle) ||{{ end }} !has(c.{{ $handler }})
|| (!(has(c.{{ $handler }}.httpGet) && has(c.{{ $handler }}.httpGet.host))
&& !(has(c.{{ $handler }}.tcpSocket) && has(c.{{ $handler }}.tcpSocket.host)))))
{{- end }}
{{- end -}}

{{/* What Pod Security calls restricted of a securityContext, as far as a template can loosen it. */}}
{{- define "polyrl.securityRule" -}}
variables.security.all(l, l.all(s, !(has(s.privileged) && s.privileged)
&& !(has(s.allowPrivilegeEscalation) && s.allowPrivilegeEscalation)
&& !(has(s.capabilities) && has(s.capabilities.add) && size(s.capabilities.add) > 0)
&& !(has(s.capabilities) && !(has(s.capabilities.drop) && 'ALL' in s.capabilities.drop))
&& !(has(s.runAsNonRoot) && !s.runAsNonRoot) && !(has(s.runAsUser) && s.runAsUser == 0)
&& !(has(s.procMount) && s.procMount != 'Default') && !has(s.windowsOptions)
&& !(has(s.sysctls) && size(s.sysctls) > 0) && !has(s.seLinuxOptions) && !has(s.appArmorProfile)
&& !(has(s.seccompProfile) && s.seccompProfile.type == 'Unconfined')))
&& variables.templates.all(t, !has(t.metadata) || !has(t.metadata.annotations)
|| t.metadata.annotations.all(k, !k.startsWith('container.apparmor.security.beta.kubernetes.io/')))
{{- end -}}

{{/* What Pod Security's restricted asks to be there, of the pod or of each container. */}}
{{- define "polyrl.restrictedRule" -}}
variables.pods.all(p, ((has(p.containers) ? p.containers : []) + (has(p.initContainers) ? p.initContainers : [])).all(c,
has(c.securityContext) && has(c.securityContext.allowPrivilegeEscalation) && !c.securityContext.allowPrivilegeEscalation
&& has(c.securityContext.capabilities) && has(c.securityContext.capabilities.drop) && 'ALL' in c.securityContext.capabilities.drop
{{- range $field := list "runAsNonRoot" "seccompProfile" }}
&& (has(c.securityContext.{{ $field }}) || (has(p.securityContext) && has(p.securityContext.{{ $field }})))
{{- end }}))
{{- end -}}

{{/* Whether the job's NetworkPolicy opens public addresses by HTTPS, as the operator decides it. */}}
{{- define "polyrl.publicHttps" -}}
!(has(object.spec.networkPolicy) && has(object.spec.networkPolicy.mode) && object.spec.networkPolicy.mode == 'None')
&& (has(object.spec.networkPolicy) && has(object.spec.networkPolicy.publicHttps) && object.spec.networkPolicy.publicHttps != 'Auto'
? object.spec.networkPolicy.publicHttps == 'Always'
: (has(object.spec.recipe.model) && has(object.spec.recipe.model.path)
&& object.spec.recipe.model.path.matches('^([A-Za-z0-9][A-Za-z0-9_.-]*/[A-Za-z0-9_.-]+$|(hf|s3|gs|file)://)'))
|| (has(object.spec.recipe.data) && has(object.spec.recipe.data.sft)
&& object.spec.recipe.data.sft.exists(f, f.path.contains('://')))
|| (has(object.spec.recipe.data) && has(object.spec.recipe.data.rl)
&& object.spec.recipe.data.rl.exists(f, f.path.contains('://')))
|| (has(object.spec.recipe.data) && has(object.spec.recipe.data.preferences)
&& object.spec.recipe.data.preferences.exists(f, f.path.contains('://')))
|| (has(object.spec.recipe.data) && has(object.spec.recipe.data.eval)
&& object.spec.recipe.data.eval.exists(f, f.path.contains('://')))
|| (has(object.spec.recipe.evaluation) && has(object.spec.recipe.evaluation.sets)
&& object.spec.recipe.evaluation.sets.exists(e, e.data.exists(f, f.path.contains('://'))))
|| (has(object.spec.recipe.logging) && has(object.spec.recipe.logging.wandb)
&& !(has(object.spec.recipe.logging.wandb.mode) && object.spec.recipe.logging.wandb.mode == 'offline')))
{{- end -}}
