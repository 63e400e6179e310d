{{- define "fiec.labels" -}}
app.kubernetes.io/name: {{ .name }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/part-of: fiec
{{- end }}

{{- define "fiec.objectLabels" -}}
{{ include "fiec.labels" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ .root.Chart.Name }}-{{ .root.Chart.Version }}
{{- end }}

{{/* The servers, for every process. */}}
{{- define "fiec.serverEnv" -}}
{{- $nats := .Values.nats -}}
{{- if and $nats.url $nats.urlSecret.name }}{{ fail "set nats.url or nats.urlSecret.name, not both" }}{{ end -}}
- name: FIEC_NATS_URL
{{- if $nats.urlSecret.name }}
  valueFrom:
    secretKeyRef: {name: {{ $nats.urlSecret.name }}, key: {{ $nats.urlSecret.key }}}
{{- else }}
  value: {{ required "set nats.url, e.g. nats://nats.nats.svc:4222, or nats.urlSecret.name" $nats.url | quote }}
{{- end }}
{{- if $nats.credsSecret.name }}
- {name: FIEC_NATS_CREDS, value: /fiec/nats/{{ $nats.credsSecret.key }}}
{{- end }}
- {name: FIEC_LOG_JSON, value: "true"}
{{- end }}

{{- define "fiec.httpEnv" -}}
- {name: FIEC_HTTP, value: "0.0.0.0:{{ .Values.port }}"}
{{- end }}

{{- define "fiec.credsMount" -}}
{{- if .Values.nats.credsSecret.name -}}
- {name: nats, mountPath: /fiec/nats, readOnly: true}
{{- end }}
{{- end }}

{{- define "fiec.credsVolume" -}}
{{- if .Values.nats.credsSecret.name -}}
- name: nats
  secret: {secretName: {{ .Values.nats.credsSecret.name }}}
{{- end }}
{{- end }}

{{- define "fiec.image" -}}
image: "{{ .image }}:{{ coalesce .tag .root.Values.image.tag .root.Chart.AppVersion }}"
imagePullPolicy: {{ .root.Values.image.pullPolicy }}
{{- end }}

{{/* Nothing here speaks to Kubernetes, and nothing needs more than the profile `restricted` allows. */}}
{{- define "fiec.pod" -}}
automountServiceAccountToken: false
securityContext:
  runAsNonRoot: true
  runAsUser: 65532
  runAsGroup: 65532
  seccompProfile: {type: RuntimeDefault}
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- end }}

{{- define "fiec.container" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end }}

{{/* Without its broker a process is not ready (/healthz). It is restarted only if it does not answer
     at all (/metrics): a restart would not bring the broker back. */}}
{{- define "fiec.probes" -}}
ports:
  - {name: http, containerPort: {{ .Values.port }}, protocol: TCP}
readinessProbe:
  httpGet: {path: /healthz, port: http}
  periodSeconds: 5
livenessProbe:
  httpGet: {path: /metrics, port: http}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
{{- end }}

{{- define "fiec.databaseEnv" -}}
- name: FIEC_DATABASE_URL
  valueFrom:
    secretKeyRef: {name: {{ .name }}, key: {{ .key }}}
{{- end }}
