{{/* What the schema cannot say: rules over several values. */}}
{{- define "clockwright.check" -}}
{{- if not .Values.insecure -}}
{{- if not (and .Values.keys.secret .Values.tls.secret) -}}
{{- fail "keys.secret and tls.secret: found one of them empty, expected the names of both Secrets, or insecure: true, which lets all who reach the Pods call all methods" -}}
{{- end -}}
{{- end -}}
{{- if not .Values.workers -}}
{{- fail "workers: found none, expected a kind, such as --set workers.cpu.replicas=1" -}}
{{- end -}}
{{- range $kind, $own := .Values.workers -}}
{{- if and $own.scale $.Values.scaler.enabled (gt (int $own.scale.min) (int $own.scale.max)) -}}
{{- fail (printf "workers.%s.scale: found min %d and max %d, expected min no more than max" $kind (int $own.scale.min) (int $own.scale.max)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
