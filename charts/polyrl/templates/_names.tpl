{{/* Name of all that belongs to the operator itself. */}}
{{- define "polyrl.name" -}}
{{- if contains "polyrl" .Release.Name -}}
{{ printf "%s-operator" (.Release.Name | trunc 48 | trimSuffix "-") }}
{{- else -}}
{{ printf "%s-polyrl-operator" (.Release.Name | trunc 41 | trimSuffix "-") }}
{{- end -}}
{{- end -}}

{{/* Name of what is cluster-scoped: two releases of one name may live in two namespaces. */}}
{{- define "polyrl.clusterName" -}}
{{ printf "%s:%s" .Release.Namespace (include "polyrl.name" .) }}
{{- end -}}

{{- define "polyrl.serviceAccount" -}}
{{ .Values.serviceAccount.name | default (ternary (include "polyrl.name" .) "default" .Values.serviceAccount.create) }}
{{- end -}}

{{/* Jobs' pods carry the name too, and the job's as instance: the component keeps a job called as the release apart. */}}
{{- define "polyrl.selector" -}}
app.kubernetes.io/name: polyrl
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: operator
{{- end -}}

{{- define "polyrl.labels" -}}
{{ include "polyrl.selector" . }}
app.kubernetes.io/part-of: polyrl
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{/* Full reference of one image. Call with (list ROOT ROLE). */}}
{{- define "polyrl.image" -}}
{{- $root := index . 0 -}}{{- $role := index . 1 -}}
{{- $images := $root.Values.images -}}
{{- if not (or (index $images $role) $images.prefix) -}}
{{- fail (printf "images.%s: no image is given and PolyRL publishes none; build and push them (make images REGISTRY=registry.example.org/polyrl TAG=%s) and set images.prefix=registry.example.org/polyrl/" $role $root.Chart.AppVersion) -}}
{{- end -}}
{{ index $images $role | default (printf "%s%s:%s" $images.prefix $role ($images.tag | default $root.Chart.AppVersion)) }}
{{- end -}}

{{/* What Pod Security `restricted` asks of a container, and a read-only root. */}}
{{- define "polyrl.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}

{{- define "polyrl.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
seccompProfile: {type: RuntimeDefault}
{{- end -}}
