{{- define "duemq.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{/* At most 40 characters, so that every name made of it fits in 63; more than 38 are refused (_role.tpl).  A release may be called a.b, a Service may not. */}}
{{- define "duemq.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- $name := include "duemq.name" . -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | replace "." "-" | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | replace "." "-" | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "duemq.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "duemq.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{- define "duemq.image" -}}
{{- $registry := default .Values.global.imageRegistry .Values.image.registry -}}
{{- $repository := .Values.image.repository -}}
{{- if $registry }}{{ $repository = printf "%s/%s" $registry $repository }}{{ end -}}
{{- if .Values.image.digest -}}
{{- printf "%s@%s" $repository .Values.image.digest -}}
{{- else -}}
{{- printf "%s:%s" $repository (default .Chart.AppVersion .Values.image.tag) -}}
{{- end -}}
{{- end -}}

{{/* What selects the pods of a role, or of a group of replicas.  Immutable in a StatefulSet: never add to it. */}}
{{- define "duemq.selector" -}}
app.kubernetes.io/name: {{ include "duemq.name" .root | quote }}
app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
app.kubernetes.io/component: {{ .role }}
{{- with .group }}
duemq/group: {{ . }}
{{- end }}
{{- end -}}

{{- define "duemq.labels" -}}
{{- $own := fromYaml (include "duemq.selector" (omit . "group")) -}}
{{- $_ := set $own "app.kubernetes.io/managed-by" .root.Release.Service -}}
{{- $usual := dict "app.kubernetes.io/version" .root.Chart.AppVersion "app.kubernetes.io/part-of" "duemq" -}}
{{- $_ := set $usual "helm.sh/chart" (printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_") -}}
{{- merge $own .root.Values.commonLabels $usual | toYaml -}}
{{- end -}}

{{/* metadata of an object: dict root, role, name; annotations of its own in `annotations`. */}}
{{- define "duemq.metadata" -}}
name: {{ .name | quote }}
namespace: {{ .root.Release.Namespace | quote }}
labels:
  {{- include "duemq.labels" . | nindent 2 }}
{{- with merge (dict) (default (dict) .annotations) .root.Values.commonAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* Name of the headless Service that gives the pods of a role their names. */}}
{{- define "duemq.headlessName" -}}
{{ include "duemq.fullname" .root }}-{{ .role }}-headless
{{- end -}}

{{/* Of a Service. */}}
{{- define "duemq.ipFamilies" -}}
{{- with .Values.ipFamilyPolicy }}
ipFamilyPolicy: {{ . }}
{{- end }}
{{- with .Values.ipFamilies }}
ipFamilies:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* The DNS domain of a role's pods. */}}
{{- define "duemq.podDomain" -}}
{{ include "duemq.headlessName" . }}.{{ .root.Release.Namespace }}.svc.{{ .root.Values.clusterDomain }}
{{- end -}}

{{/* Addresses of all nameservers, comma-separated. */}}
{{- define "duemq.nameservers" -}}
{{- $domain := include "duemq.podDomain" (dict "root" . "role" "nameserver") -}}
{{- $addresses := list -}}
{{- range until (int .Values.nameserver.replicas) -}}
{{- $pod := printf "%s-nameserver-%d" (include "duemq.fullname" $) . -}}
{{- $addresses = append $addresses (printf "%s.%s:%d" $pod $domain (int $.Values.nameserver.port)) -}}
{{- end -}}
{{- join "," $addresses -}}
{{- end -}}

{{/* The one address of all, by the name that a certificate is for. */}}
{{- define "duemq.anyNameserver" -}}
{{ printf "%s-nameserver.%s.svc.%s:%d" (include "duemq.fullname" .) .Release.Namespace .Values.clusterDomain (int .Values.nameserver.port) }}
{{- end -}}

{{/* Where the files of values.tls lie in a pod; the variables that name them, their volume and its mount. */}}
{{- define "duemq.tls.folder" -}}/etc/duemq-tls{{- end -}}

{{/* Of a port for gRPC, for meshes and gateways. */}}
{{- define "duemq.appProtocol" -}}
{{ ternary "https" "kubernetes.io/h2c" (not (empty .Values.tls.secretName)) }}
{{- end -}}

{{/* Services and clients read the same variables. */}}
{{- define "duemq.tls.env" -}}
{{- if .Values.tls.secretName }}
- name: DUEMQ_TLS_CA
  value: {{ include "duemq.tls.folder" . }}/ca.crt
- name: DUEMQ_TLS_CERT
  value: {{ include "duemq.tls.folder" . }}/tls.crt
- name: DUEMQ_TLS_KEY
  value: {{ include "duemq.tls.folder" . }}/tls.key
{{- end }}
{{- end -}}

{{- define "duemq.tls.volume" -}}
{{- with .Values.tls.secretName }}
- name: tls
  secret:
    secretName: {{ . | quote }}
{{- end }}
{{- end -}}

{{- define "duemq.tls.volumeMount" -}}
{{- if .Values.tls.secretName }}
- name: tls
  mountPath: {{ include "duemq.tls.folder" . }}
  readOnly: true
{{- end }}
{{- end -}}

{{- define "duemq.pullSecrets" -}}
{{- with .Values.global.imagePullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . | quote }}
  {{- end }}
{{- end }}
{{- end -}}
