{{/*
What the three roles have in common.  Each template takes a dict:
  root     the chart's context
  role     nameserver | broker | timer-service
  service  the gRPC service by whose health readiness is judged
  values   the role's values
  size     replicas of each broker or timer shard; 1, or not there: no replicas
Of a group of replicas, besides:
  group    its name: the broker's, the shard's
  index    its number
*/}}

{{/* "true" where the role has replicas. */}}
{{- define "duemq.role.replicated" -}}
{{- if gt (int (default 1 .size)) 1 }}true{{ end -}}
{{- end -}}

{{/* Name of a set of pods: the group's, or the role's. */}}
{{- define "duemq.role.setName" -}}
{{- default (printf "%s-%s" (include "duemq.fullname" .root) .role) .group -}}
{{- end -}}

{{/* The file of settings: an annotation, so that it belongs to a pod as its image does.  Nothing secret: who may see pods reads it. */}}
{{- define "duemq.role.config" -}}
{{- $settings := .values.settings -}}
{{- if not (include "duemq.role.replicated" .) -}}
{{- $settings = omit $settings "min_insync" "lease_duration" "lag_max" "catch_up_rate" -}}
{{- end -}}
{{/* JSON's texts, numbers, booleans and lists of them are TOML, too. */}}
{{- range $key, $value := $settings }}
{{ $key }} = {{ toJson $value }}
{{- end }}
{{- end -}}

{{/* Gives every pod a name.  Not-ready pods, too: they register, and are found, by it. */}}
{{- define "duemq.role.headless" -}}
apiVersion: v1
kind: Service
metadata:
  {{- include "duemq.metadata" (merge (dict "name" (include "duemq.headlessName" .)) .) | nindent 2 }}
spec:
  clusterIP: None
  {{- include "duemq.ipFamilies" .root | nindent 2 }}
  publishNotReadyAddresses: true
  selector:
    {{- include "duemq.selector" . | nindent 4 }}
  ports:
    - name: grpc
      port: {{ .values.port }}
      targetPort: grpc
      protocol: TCP
      appProtocol: {{ include "duemq.appProtocol" .root }}
    {{- if .root.Values.metrics.enabled }}
    - name: metrics
      port: {{ .values.metricsPort }}
      targetPort: metrics
      protocol: TCP
      appProtocol: http
    {{- end }}
{{- end -}}

{{- define "duemq.role.podDisruptionBudget" -}}
{{- if .values.podDisruptionBudget.enabled }}
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  {{- include "duemq.metadata" (merge (dict "name" (include "duemq.role.setName" .)) .) | nindent 2 }}
spec:
  maxUnavailable: {{ .values.podDisruptionBudget.maxUnavailable }}
  # Else a drain waits for ever for the only pod of a role, or most of a group's, if that is not ready.
  unhealthyPodEvictionPolicy: AlwaysAllow
  selector:
    matchLabels:
      {{- include "duemq.selector" . | nindent 6 }}
{{- end }}
{{- end -}}

{{- define "duemq.role.serviceMonitor" -}}
{{- $monitor := .root.Values.metrics.serviceMonitor }}
{{- if and .root.Values.metrics.enabled $monitor.enabled }}
apiVersion: monitoring.coreos.com/v1
kind: ServiceMonitor
metadata:
  name: {{ include "duemq.fullname" .root }}-{{ .role }}
  namespace: {{ .root.Release.Namespace | quote }}
  labels:
    {{- toYaml (merge (dict) $monitor.labels (fromYaml (include "duemq.labels" .))) | nindent 4 }}
  {{- with .root.Values.commonAnnotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  selector:
    matchLabels:
      {{- include "duemq.selector" . | nindent 6 }}
  endpoints:
    - port: metrics
      interval: {{ $monitor.interval }}
{{- end }}
{{- end -}}

{{- define "duemq.role.statefulSet" -}}
{{- include "duemq.role.checkSettings" . -}}
{{- include "duemq.role.checkSelector" . -}}
{{- $fullname := include "duemq.role.setName" . -}}
{{/* Its pods get a label with the name and up to 11 characters more, of 63: beyond that there would be none. */}}
{{- if gt (len $fullname) 52 }}
{{- fail (printf "%s is too long a name of a StatefulSet, at most 52 characters: choose a shorter fullnameOverride" $fullname) }}
{{- end }}
{{- if and .root.Values.metrics.enabled (eq (int .values.port) (int .values.metricsPort)) }}
{{- fail (printf "%s: port and metricsPort are both %v" .role .values.port) }}
{{- end }}
{{- if and .root.Values.tls.secretName (has (int .root.Values.tls.healthPort) (list (int .values.port) (int .values.metricsPort))) }}
{{- fail (printf "%s: tls.healthPort is %v, which is its port or metricsPort" .role .root.Values.tls.healthPort) }}
{{- end }}
{{- if and .root.Values.tls.permissions (not (and .root.Values.tls.secretName .root.Values.tls.verifyClients)) }}
{{- fail "tls.permissions needs tls.secretName and tls.verifyClients: who calls is known by certificates" }}
{{- end }}
{{- $persistence := default dict .values.persistence -}}
{{- with $persistence }}
{{- include "duemq.role.checkClaimTemplate" $ }}
{{- end -}}
apiVersion: apps/v1
kind: StatefulSet
metadata:
  {{- include "duemq.metadata" (merge (dict "name" $fullname) .) | nindent 2 }}
spec:
  replicas: {{ ternary .size .values.replicas (hasKey . "group") }}
  serviceName: {{ include "duemq.headlessName" . }}
  # No pod waits for another one of its role.
  podManagementPolicy: Parallel
  updateStrategy:
    {{- toYaml .values.updateStrategy | nindent 4 }}
  minReadySeconds: {{ .values.minReadySeconds }}
  selector:
    matchLabels:
      {{- include "duemq.selector" . | nindent 6 }}
  {{- with $persistence.retentionPolicy }}
  persistentVolumeClaimRetentionPolicy:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  template:
    metadata:
      labels:
        {{- toYaml (merge (fromYaml (include "duemq.selector" .)) .values.podLabels .root.Values.commonLabels) | nindent 8 }}
      annotations:
        {{- $own := dict "duemq/settings" (include "duemq.role.config" . | trim | printf "%s\n") }}
        {{- toYaml (merge $own .values.podAnnotations .root.Values.commonAnnotations) | nindent 8 }}
    spec:
      {{- include "duemq.role.pod" . | nindent 6 }}
  {{- if $persistence.enabled }}
  volumeClaimTemplates:
    - apiVersion: v1
      kind: PersistentVolumeClaim
      metadata:
        name: data
        {{- with $persistence.annotations }}
        annotations:
          {{- toYaml . | nindent 10 }}
        {{- end }}
      spec:
        accessModes:
          {{- toYaml $persistence.accessModes | nindent 10 }}
        {{- with default .root.Values.global.storageClass $persistence.storageClass }}
        storageClassName: {{ ternary "" . (eq . "-") | quote }}
        {{- end }}
        resources:
          requests:
            storage: {{ $persistence.size | quote }}
  {{- end }}
{{- end -}}

{{/* Kubernetes refuses another one, after half of the upgrade, and does not say which value it is. */}}
{{- define "duemq.role.checkClaimTemplate" -}}
{{- $name := include "duemq.role.setName" . }}
{{- $wanted := .values.persistence }}
{{- with lookup "apps/v1" "StatefulSet" .root.Release.Namespace $name }}
{{- $values := dict "enabled" (list (not (empty .spec.volumeClaimTemplates)) $wanted.enabled) }}
{{- if and $wanted.enabled .spec.volumeClaimTemplates }}
{{- $claim := first .spec.volumeClaimTemplates }}
{{- $class := default $.root.Values.global.storageClass $wanted.storageClass | default "" }}
{{- $_ := set $values "accessModes" (list (join "," $claim.spec.accessModes) (join "," $wanted.accessModes)) }}
{{- $_ := set $values "storageClass" (list (default "" $claim.spec.storageClassName) (ternary "" $class (eq $class "-"))) }}
{{- $_ := set $values "annotations" (list (dig "metadata" "annotations" dict $claim | toJson) (default dict $wanted.annotations | toJson)) }}
{{- $size := $claim.spec.resources.requests.storage }}
{{- if ne (include "duemq.bytesThere" $size | float64 | printf "%.0f") (include "duemq.amount" $wanted.size | float64 | printf "%.0f") }}
{{- $_ := set $values "size" (list $size $wanted.size) }}
{{- end }}
{{- end }}
{{- range $key, $pair := $values }}
{{- if ne (first $pair) (last $pair) }}
{{- fail (printf "%s: persistence.%s is %v, of the StatefulSet %s %v, which cannot be changed: see \"Other volumes\" in the chart's README" $.role $key (last $pair) $name (first $pair)) }}
{{- end }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "duemq.role.pod" -}}
serviceAccountName: {{ include "duemq.serviceAccountName" .root | quote }}
{{- $ownLeases := and .group (eq .root.Values.leaseStore "kubernetes") }}
automountServiceAccountToken: {{ or .root.Values.serviceAccount.automount (not (empty $ownLeases)) }}
# Kubernetes' own variables of a Service look like DueMQ's: DUEMQ_BROKER_PORT and so on.
enableServiceLinks: false
{{- include "duemq.pullSecrets" .root }}
{{- include "duemq.pod.place" . }}
terminationGracePeriodSeconds: {{ .values.terminationGracePeriodSeconds }}
securityContext:
  {{- toYaml .root.Values.podSecurityContext | nindent 2 }}
{{- with .values.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
topologySpreadConstraints:
{{- with .values.topologySpreadConstraints }}
  {{- toYaml . | nindent 2 }}
{{- else }}
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    {{- if .group }}
    # Two replicas on one machine would be lost with it.  Where there are fewer machines, as evenly as can be.
    whenUnsatisfiable: DoNotSchedule
    nodeTaintsPolicy: Honor
    {{- else }}
    whenUnsatisfiable: ScheduleAnyway
    {{- end }}
    labelSelector:
      matchLabels:
        {{- include "duemq.selector" . | nindent 8 }}
  {{- if .group }}
  - maxSkew: 1
    topologyKey: topology.kubernetes.io/zone
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "duemq.selector" . | nindent 8 }}
  {{- end }}
{{- end }}
{{- with .values.extraInitContainers }}
initContainers:
  {{- toYaml . | nindent 2 }}
{{- end }}
containers:
  - name: {{ .role }}
    image: {{ include "duemq.image" .root | quote }}
    imagePullPolicy: {{ .root.Values.image.pullPolicy }}
    command: [duemq-{{ .role }}]
    args:
      - --config=/etc/duemq/duemq.toml
      - --listen=0.0.0.0:{{ .values.port }}
      - --advertise=$(POD_NAME).{{ include "duemq.podDomain" . }}:{{ .values.port }}
      {{- if .root.Values.metrics.enabled }}
      - --metrics-listen=0.0.0.0:{{ .values.metricsPort }}
      {{- end }}
      {{- if .root.Values.tls.secretName }}
      {{- if .root.Values.tls.verifyClients }}
      - --tls-verify-clients
      {{- end }}
      {{- if .root.Values.tls.permissions }}
      - --permissions=/etc/duemq-permissions/permissions.toml
      {{- end }}
      - --health-listen=0.0.0.0:{{ .root.Values.tls.healthPort }}
      {{- end }}
      {{- if (.root.Values.external).enabled }}
      {{- include "duemq.external.checkAll" .root }}
      {{- $external := include "duemq.external.values" . | fromJson }}
      - --external-listen=0.0.0.0:{{ int $external.port }}
      {{- if ne .role "nameserver" }}
      - --external-advertise={{ include "duemq.external.advertise" . }}
      {{- end }}
      {{- end }}
      {{- if ne .role "nameserver" }}
      - --name={{ default "$(POD_NAME)" .group }}
      - --data-dir=/var/lib/duemq
      - --nameservers={{ include "duemq.nameservers" .root }}
      {{- end }}
      {{- if eq .role "timer-service" }}
      - --shard={{ ternary .index "$(POD_INDEX)" (hasKey . "group") }}
      - --shards={{ default .values.replicas .values.shards }}
      {{- end }}
      {{- if .group }}
      - --replica=$(POD_INDEX)
      - --replicas={{ join "," (until (int .size)) }}
      - --lease-store={{ .root.Values.leaseStore }}
      {{- if .root.Values.leaseStoreSecret }}
      - --lease-store-ca=/etc/lease-store/ca.crt
      - --lease-store-cert=/etc/lease-store/tls.crt
      - --lease-store-key=/etc/lease-store/tls.key
      {{- end }}
      {{- end }}
    env:
      - name: POD_NAME
        valueFrom:
          fieldRef:
            fieldPath: metadata.name
      {{- if or .group (eq .role "timer-service") (and (eq .role "broker") (.root.Values.external).enabled) }}
      - name: POD_INDEX
        valueFrom:
          fieldRef:
            fieldPath: metadata.labels['apps.kubernetes.io/pod-index']
      {{- end }}
      {{- include "duemq.tls.env" .root | nindent 6 }}
      {{- if hasKey .values.settings "tracing" }}
      {{- with .root.Values.tracing.otlp.endpoint }}
      - name: OTEL_EXPORTER_OTLP_ENDPOINT
        value: {{ . | quote }}
      {{- end }}
      {{- with .root.Values.tracing.otlp.headersSecret }}
      {{- if .name }}
      - name: OTEL_EXPORTER_OTLP_HEADERS
        valueFrom:
          secretKeyRef:
            name: {{ .name | quote }}
            key: {{ .key | quote }}
      {{- end }}
      {{- end }}
      {{- end }}
      {{- with concat .root.Values.extraEnv .values.extraEnv }}
      {{- toYaml . | nindent 6 }}
      {{- end }}
    {{- with .root.Values.extraEnvFrom }}
    envFrom:
      {{- toYaml . | nindent 6 }}
    {{- end }}
    ports:
      - name: grpc
        containerPort: {{ .values.port }}
        protocol: TCP
      {{- if .root.Values.metrics.enabled }}
      - name: metrics
        containerPort: {{ .values.metricsPort }}
        protocol: TCP
      {{- end }}
      {{- if (.root.Values.external).enabled }}
      - name: external
        containerPort: {{ (include "duemq.external.values" . | fromJson).port | int }}
        protocol: TCP
      {{- end }}
      {{- if .root.Values.tls.secretName }}
      - name: health
        containerPort: {{ .root.Values.tls.healthPort }}
        protocol: TCP
      {{- end }}
    {{- /* Probes know no TLS. */}}
    {{- $probed := ternary .root.Values.tls.healthPort .values.port (not (empty .root.Values.tls.secretName)) }}
    {{- $ready := ternary "duemq.replication.v1.Replication" .service (hasKey . "group") }}
    {{- $values := .values }}
    {{- range $name, $service := dict "startup" "" "readiness" $ready "liveness" "" }}
    {{- with get (default dict $values.probes) $name }}
    {{ $name }}Probe:
      {{- include "duemq.role.probe" (dict "port" $probed "service" $service "probe" .) | nindent 6 }}
    {{- end }}
    {{- end }}
    resources:
      {{- toYaml .values.resources | nindent 6 }}
    securityContext:
      {{- toYaml .root.Values.securityContext | nindent 6 }}
    volumeMounts:
      - name: config
        mountPath: /etc/duemq
        readOnly: true
      {{- if .root.Values.tls.permissions }}
      - name: permissions
        mountPath: /etc/duemq-permissions
        readOnly: true
      {{- end }}
      - name: tmp
        mountPath: /tmp
      {{- if .values.persistence }}
      - name: data
        mountPath: /var/lib/duemq
      {{- end }}
      {{- include "duemq.tls.volumeMount" .root | nindent 6 }}
      {{- if and .group .root.Values.leaseStoreSecret }}
      - name: lease-store
        mountPath: /etc/lease-store
        readOnly: true
      {{- end }}
      {{- with .values.extraVolumeMounts }}
      {{- toYaml . | nindent 6 }}
      {{- end }}
  {{- with .values.extraContainers }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
volumes:
  - name: config
    downwardAPI:
      items:
        - path: duemq.toml
          fieldRef:
            fieldPath: metadata.annotations['duemq/settings']
  {{- if .root.Values.tls.permissions }}
  - name: permissions
    configMap:
      name: {{ include "duemq.fullname" .root }}-permissions
  {{- end }}
  - name: tmp
    emptyDir: {}
  {{- if and .values.persistence (not .values.persistence.enabled) }}
  - name: data
    emptyDir: {}
  {{- end }}
  {{- include "duemq.tls.volume" .root | nindent 2 }}
  {{- if and .group .root.Values.leaseStoreSecret }}
  - name: lease-store
    secret:
      secretName: {{ .root.Values.leaseStoreSecret | quote }}
  {{- end }}
  {{- with .values.extraVolumes }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end -}}

{{/* Liveness asks for the process (""), readiness for its service; of a replica, whether it is in sync. */}}
{{- define "duemq.role.probe" -}}
grpc:
  port: {{ .port }}
  service: {{ .service | quote }}
{{ toYaml .probe }}
{{- end -}}

{{/* Data under the names of the other layout would be left behind in silence.  What is not asked, as by `helm template`, is not there. */}}
{{- define "duemq.role.checkClaims" -}}
{{- $role := . }}
{{- range $index := until (int .values.replicas) }}
{{- $alone := printf "data-%s-%s-%d" (include "duemq.fullname" $role.root) $role.role $index }}
{{- $first := printf "%s-0" $alone }}
{{- $kept := ternary $alone $first (eq (include "duemq.role.replicated" $role) "true") }}
{{- $wanted := ternary $first $alone (eq (include "duemq.role.replicated" $role) "true") }}
{{- $namespace := $role.root.Release.Namespace }}
{{- if and (lookup "v1" "PersistentVolumeClaim" $namespace $kept) (not (lookup "v1" "PersistentVolumeClaim" $namespace $wanted)) }}
{{- fail (printf "%s: the claim %s has data that nobody would read: with %d replicas of each the name is %s. Give that claim its volume first (\"Replicas\" in the chart's README), or delete %s to begin without them" $role.role $kept (int (default 1 $role.size)) $wanted $kept) }}
{{- end }}
{{- end }}
{{- end -}}

{{/* The pods of a role that keeps data: one set of all, or one of each group of replicas. */}}
{{- define "duemq.role.sets" -}}
{{- if gt (int .values.shards) (int .values.replicas) }}
{{- fail (printf "%s: shards is %v, of %v replicas" .role .values.shards .values.replicas) }}
{{- end }}
{{- if .values.persistence.enabled }}
{{- include "duemq.role.checkVolume" . }}
{{- include "duemq.role.checkClaims" . }}
{{- end }}
{{- if not (include "duemq.role.replicated" .) }}
{{ include "duemq.role.statefulSet" . }}
---
{{ include "duemq.role.podDisruptionBudget" . }}
{{- else }}
{{- if gt (int .values.settings.min_insync) (int .size) }}
{{- fail (printf "%s: settings.min_insync is %v, of %v replicas" .role .values.settings.min_insync .size) }}
{{- end }}
{{- if eq (default "" .values.settings.flush_mode) "async" }}
{{- fail (printf "%s: settings.flush_mode is async, with replicas it must be sync" .role) }}
{{- end }}
{{- $store := .root.Values.leaseStore }}
{{- if and .root.Values.leaseStoreSecret (not (hasPrefix "etcd:https://" $store)) }}
{{- fail (printf "leaseStoreSecret is %s, leaseStore %s: it is for etcd:https://HOST:PORT" .root.Values.leaseStoreSecret $store) }}
{{- end }}
{{- $role := . }}
{{- range $index := until (int .values.replicas) }}
{{- $name := printf "%s-%s-%d" (include "duemq.fullname" $role.root) $role.role $index }}
{{- $group := merge (dict "group" $name "index" $index) $role }}
---
{{ include "duemq.role.statefulSet" $group }}
---
{{ include "duemq.role.podDisruptionBudget" $group }}
{{- end }}
{{- end }}
{{- end -}}
