{{/* The names of all objects begin with it. */}}
{{- define "clockwright.name" -}}
{{- if contains .Chart.Name .Release.Name -}}{{ .Release.Name }}{{- else -}}{{ .Release.Name }}-{{ .Chart.Name }}{{- end -}}
{{- end -}}

{{/* Of what Pods are chosen by; takes a dict of root and component. */}}
{{- define "clockwright.selector" -}}
app.kubernetes.io/name: {{ .root.Chart.Name }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{- define "clockwright.labels" -}}
{{ include "clockwright.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/part-of: {{ .root.Chart.Name }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ .root.Chart.Name }}-{{ .root.Chart.Version }}
{{- end -}}

{{/* Takes the root and an image of its own, which may be empty. */}}
{{- define "clockwright.image" -}}
{{- $image := merge (dict) (.image | default dict) .root.Values.image -}}
image: "{{ $image.repository }}:{{ $image.tag | default .root.Chart.AppVersion }}"
imagePullPolicy: {{ .root.Values.image.pullPolicy }}
{{- end -}}

{{/* Where workers and fronts find the controllers: each by a name that it keeps. */}}
{{- define "clockwright.controllers" -}}
{{- $name := include "clockwright.name" . -}}
{{- range $i := until (int .Values.controller.replicas) -}}
{{- if $i }},{{ end -}}
{{ $name }}-controller-{{ $i }}.{{ $name }}-controller.{{ $.Release.Namespace }}.svc:8001
{{- end -}}
{{- end -}}

{{- define "clockwright.lease" -}}
{{- if .Values.controller.lease -}}{{ .Values.controller.lease }}
{{- else if gt (int .Values.controller.replicas) 1 -}}kubernetes://{{ .Release.Namespace }}/{{ include "clockwright.name" . }}
{{- end -}}
{{- end -}}

{{/* An account that may do something in this namespace; takes root, component and rules. */}}
{{- define "clockwright.account" -}}
{{- $name := printf "%s-%s" (include "clockwright.name" .root) .component -}}
{{- $labels := include "clockwright.labels" . -}}
apiVersion: v1
kind: ServiceAccount
metadata:
  name: {{ $name }}
  labels: {{- $labels | nindent 4 }}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata:
  name: {{ $name }}
  labels: {{- $labels | nindent 4 }}
rules: {{- toYaml .rules | nindent 2 }}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata:
  name: {{ $name }}
  labels: {{- $labels | nindent 4 }}
roleRef:
  apiGroup: rbac.authorization.k8s.io
  kind: Role
  name: {{ $name }}
subjects:
  - kind: ServiceAccount
    name: {{ $name }}
    namespace: {{ .root.Release.Namespace }}
{{- end -}}

{{/* The fields of every Pod; takes root, component and own (nodeSelector, tolerations, affinity). */}}
{{- define "clockwright.pod" -}}
enableServiceLinks: false
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- with .own.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .own.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .own.affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels: {{- include "clockwright.selector" . | nindent 8 }}
{{- end -}}

{{- define "clockwright.containerSecurity" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
{{- end -}}

{{/* Volumes of every Pod; takes root, files of the Secret of keys, and whether it serves TLS. */}}
{{- define "clockwright.volumes" -}}
- name: tmp
  emptyDir: {}
{{- if .root.Values.keys.secret }}
- name: keys
  secret:
    secretName: {{ .root.Values.keys.secret }}
    defaultMode: 0440
    items:
      {{- range .keys }}
      - {key: {{ . }}, path: {{ . }}}
      {{- end }}
{{- end }}
{{- if .root.Values.tls.secret }}
- name: tls
  secret:
    secretName: {{ .root.Values.tls.secret }}
    defaultMode: 0440
    items:
      {{- if .serves }}
      - {key: tls.crt, path: tls.crt}
      - {key: tls.key, path: tls.key}
      {{- end }}
      - {key: ca.crt, path: ca.crt}
{{- end }}
{{- end -}}

{{- define "clockwright.mounts" -}}
- {name: tmp, mountPath: /tmp}
{{- if .Values.keys.secret }}
- {name: keys, mountPath: /etc/clockwright/keys, readOnly: true}
{{- end }}
{{- if .Values.tls.secret }}
- {name: tls, mountPath: /etc/clockwright/tls, readOnly: true}
{{- end }}
{{- end -}}

{{/* Flags of what serves: the controller and fronts. */}}
{{- define "clockwright.serving" -}}
- --host={{ .Values.host }}
- --port=8001
- --http-port=8000
{{- if .Values.insecure }}
- --insecure
{{- end }}
{{- if .Values.keys.secret }}
- --keys=/etc/clockwright/keys/keys
{{- end }}
{{- if .Values.tls.secret }}
- --tls-cert=/etc/clockwright/tls/tls.crt
- --tls-key=/etc/clockwright/tls/tls.key
{{- end }}
- --log-format={{ .Values.logFormat }}
{{- end -}}

{{/* Whether the process lives: it answers whatever its controller does. By HTTP, because the kubelet's gRPC has no TLS. */}}
{{- define "clockwright.live" -}}
httpGet: {path: /v2/health/live, port: http{{ if .Values.tls.secret }}, scheme: HTTPS{{ end }}}
{{- end -}}
