{{/* Jobs over the lake of traces: one volume, one image with Spark. */}}

{{- define "duemq.traces.claim" -}}
{{- include "duemq.traces.checkClaim" . -}}
{{- $claim := .Values.traces.persistence -}}
{{/* The lake outlives the release, as the messages do. */}}
{{- $annotations := merge (dict) $claim.annotations (dict "helm.sh/resource-policy" "keep") }}
apiVersion: v1
kind: PersistentVolumeClaim
metadata:
  {{- include "duemq.metadata" (dict "root" . "role" "trace-lake" "name" (printf "%s-trace-lake" (include "duemq.fullname" .)) "annotations" $annotations) | nindent 2 }}
spec:
  accessModes:
    {{- toYaml $claim.accessModes | nindent 4 }}
  {{- with default .Values.global.storageClass $claim.storageClass }}
  storageClassName: {{ ternary "" . (eq . "-") | quote }}
  {{- end }}
  resources:
    requests:
      storage: {{ $claim.size | quote }}
{{- end -}}

{{- define "duemq.traces.pod" -}}
serviceAccountName: {{ include "duemq.serviceAccountName" . | quote }}
automountServiceAccountToken: false
enableServiceLinks: false
{{- include "duemq.pullSecrets" . }}
securityContext:
  {{- toYaml .Values.podSecurityContext | nindent 2 }}
{{- include "duemq.pod.place" (dict "values" .Values.traces "role" "traces") }}
volumes:
  - name: lake
    persistentVolumeClaim:
      claimName: {{ include "duemq.fullname" . }}-trace-lake
  - name: tmp
    emptyDir: {}
  {{- include "duemq.tls.volume" . | nindent 2 }}
{{- end -}}

{{/* dict root, arguments: the command and its first options. */}}
{{- define "duemq.traces.container" -}}
{{- $image := dict "Chart" .root.Chart "Values" (dict "global" .root.Values.global "image" .root.Values.traces.image) -}}
image: {{ include "duemq.image" $image | quote }}
imagePullPolicy: {{ .root.Values.traces.image.pullPolicy }}
command: [python, -m, duemq_analytics]
args:
  {{- toYaml .arguments | nindent 2 }}
  {{- if eq (first .arguments) "land" }}
  - --nameserver={{ include "duemq.nameservers" .root }}
  - --output=/var/lib/duemq-traces
  {{- if .root.Values.traces.skipLost }}
  - --skip-lost
  {{- end }}
  {{- else }}
  - --lake=/var/lib/duemq-traces
  {{- end }}
  {{- if eq (first .arguments) "report" }}
  - --output=/var/lib/duemq-traces/report
  {{- end }}
{{- if or .root.Values.extraEnv .root.Values.tls.secretName }}
env:
  {{- include "duemq.tls.env" .root | nindent 2 }}
  {{- with .root.Values.extraEnv }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}
{{- with .root.Values.extraEnvFrom }}
envFrom:
  {{- toYaml . | nindent 2 }}
{{- end }}
resources:
  {{- toYaml .root.Values.traces.resources | nindent 2 }}
securityContext:
  {{- toYaml .root.Values.securityContext | nindent 2 }}
volumeMounts:
  - name: lake
    mountPath: /var/lib/duemq-traces
  - name: tmp
    mountPath: /tmp
  {{- include "duemq.tls.volumeMount" .root | nindent 2 }}
{{- end -}}
