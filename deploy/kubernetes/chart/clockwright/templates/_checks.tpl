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
{{- $scaled := false -}}
{{- range $kind, $own := .Values.workers -}}
{{- if $own.scale -}}
{{- $scaled = true -}}
{{- end -}}
{{- if and $own.scale $.Values.scaler.enabled (gt (int $own.scale.min) (int $own.scale.max)) -}}
{{- fail (printf "workers.%s.scale: found min %d and max %d, expected min no more than max" $kind (int $own.scale.min) (int $own.scale.max)) -}}
{{- end -}}
{{- end -}}
{{- if and .Values.scaler.enabled (not $scaled) -}}
{{- fail (printf "scaler.enabled: found no kind of workers with scale (%s), expected one at least, such as --set workers.%s.scale.min=1,workers.%s.scale.max=8; or scaler.enabled: false" (keys .Values.workers | sortAlpha | join ", ") (keys .Values.workers | sortAlpha | first) (keys .Values.workers | sortAlpha | first)) -}}
{{- end -}}
{{- end -}}
