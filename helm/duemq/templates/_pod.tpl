{{/* What every pod may be told of where it runs and how it finds names: dict values, role (for messages). */}}
{{- define "duemq.pod.place" -}}
{{- with .values.priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
{{- with .values.runtimeClassName }}
runtimeClassName: {{ . | quote }}
{{- end }}
{{- with .values.hostAliases }}
hostAliases:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- if and (eq (default "" .values.dnsPolicy) "None") (not (get (default dict .values.dnsConfig) "nameservers")) }}
{{- fail (printf "%s: dnsPolicy None needs dnsConfig.nameservers: Kubernetes takes no pod without" .role) }}
{{- end }}
{{- with .values.dnsPolicy }}
dnsPolicy: {{ . | quote }}
{{- end }}
{{- with .values.dnsConfig }}
dnsConfig:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}
