{{/* What the schema cannot say: values with which processes end at their start, or stop later, or that do nothing. */}}

{{/* 250ms, 4MiB or 20Gi in seconds or bytes. */}}
{{- define "duemq.amount" -}}
{{- if kindIs "string" . -}}
{{- $factors := dict "" 1 "ms" 0.001 "s" 1 "m" 60 "h" 3600 "d" 86400 "B" 1 -}}
{{- $factors = merge $factors (dict "KiB" 1024 "MiB" 1048576 "GiB" 1073741824 "TiB" 1099511627776) -}}
{{- $factors = merge $factors (dict "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 "Pi" 1125899906842624) -}}
{{- $factors = merge $factors (dict "k" 1000 "M" 1000000 "G" 1000000000 "T" 1000000000000 "P" 1000000000000000) -}}
{{- mulf (regexFind "^[0-9.]+" . | float64) (get $factors (regexFind "[A-Za-z]*$" .)) -}}
{{- else -}}
{{- float64 . -}}
{{- end -}}
{{- end -}}

{{/* Of a volume that is there: 2.1Gi is no whole number of bytes, Kubernetes has it in thousandths. */}}
{{- define "duemq.bytesThere" -}}
{{- ternary (mulf 0.001 (trimSuffix "m" . | float64)) (include "duemq.amount" . | float64) (hasSuffix "m" .) -}}
{{- end -}}

{{/* A process that refuses a setting would be away, one of each role, until somebody looks. */}}
{{- define "duemq.role.checkSettings" -}}
{{- $role := . -}}
{{- range $name, $bounds := get (.root.Files.Get "files/limits.yaml" | fromYaml) .role }}
{{- $given := get $role.values.settings $name }}
{{- if not (or (kindIs "invalid" $given) (eq (toString $given) "")) }}
{{- $amount := include "duemq.amount" $given | float64 }}
{{- $least := first $bounds }}
{{- $most := last $bounds }}
{{- $above := and (not (kindIs "invalid" $most)) (gt $amount (float64 $most)) }}
{{- if or $above (lt $amount (float64 $least)) }}
{{- $range := ternary (printf "at least %s" (toJson $least)) (printf "%s to %s" (toJson $least) (toJson $most)) (kindIs "invalid" $most) }}
{{- fail (printf "%s: settings.%s is %v, must be %s, in seconds or bytes" $role.role $name $given $range) }}
{{- end }}
{{- end }}
{{- end }}
{{- with $role.values.settings.retry_delays }}
{{- range regexSplit "\\s+" (trim .) -1 }}
{{- if gt (include "duemq.amount" . | float64) 31622400.0 }}
{{- fail (printf "%s: settings.retry_delays has %s, each must be 0 to 366 days" $role.role .) }}
{{- end }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "duemq.role.checkVolume" -}}
{{- $size := include "duemq.amount" .values.persistence.size | float64 }}
{{- $free := include "duemq.amount" (default 0 .values.settings.free_bytes_min) | float64 }}
{{- if ge $free $size }}
{{- fail (printf "%s: persistence.size is %s, settings.free_bytes_min %v: nothing would ever be accepted" .role .values.persistence.size .values.settings.free_bytes_min) }}
{{- end }}
{{- if eq .role "broker" }}
{{- $segment := include "duemq.amount" (default 0 .values.settings.segment_bytes) | float64 }}
{{- if ge (addf $segment $free) $size }}
{{- fail (printf "broker: persistence.size is %s, settings.segment_bytes %v: the disk would be full before the first segment is, and only whole ones are ever removed; make segments smaller, or the volume larger" .values.persistence.size .values.settings.segment_bytes) }}
{{- end }}
{{- end }}
{{- end -}}

{{/* Kubernetes refuses another one, after half of the upgrade. */}}
{{- define "duemq.role.checkSelector" -}}
{{- $set := include "duemq.role.setName" . }}
{{- $wanted := include "duemq.name" .root }}
{{- $there := dig "spec" "selector" "matchLabels" "app.kubernetes.io/name" $wanted (lookup "apps/v1" "StatefulSet" .root.Release.Namespace $set) }}
{{- if ne $there $wanted }}
{{- fail (printf "nameOverride makes it %s, what selects the pods of the StatefulSet %s, which is %s and cannot be changed" $wanted $set $there) }}
{{- end }}
{{- end -}}

{{/* As above; of a claim that named no class the cluster has filled it in. */}}
{{- define "duemq.traces.checkClaim" -}}
{{- $wanted := .Values.traces.persistence }}
{{- $name := printf "%s-trace-lake" (include "duemq.fullname" .) }}
{{- with lookup "v1" "PersistentVolumeClaim" .Release.Namespace $name }}
{{- $spec := default dict .spec }}
{{- $values := dict "accessModes" (list (join "," $spec.accessModes) (join "," $wanted.accessModes)) }}
{{- with default $.Values.global.storageClass $wanted.storageClass }}
{{- $_ := set $values "storageClass" (list (default "" $spec.storageClassName) (ternary "" . (eq . "-"))) }}
{{- end }}
{{- range $key, $pair := $values }}
{{- if ne (first $pair) (last $pair) }}
{{- fail (printf "traces: persistence.%s is %s, of the claim %s %s, which cannot be changed: delete the claim, and with it what was landed, or leave the value" $key (last $pair) $name (first $pair)) }}
{{- end }}
{{- end }}
{{- $size := dig "resources" "requests" "storage" $wanted.size $spec }}
{{- if gt (include "duemq.bytesThere" $size | float64 | floor) (include "duemq.amount" $wanted.size | float64 | ceil) }}
{{- fail (printf "traces: persistence.size is %s, of the claim %s %s, which cannot shrink" $wanted.size $name $size) }}
{{- end }}
{{- end }}
{{- end -}}

{{/* A shard that takes messages over until its pod goes leaves them on a volume, where nothing fires. */}}
{{- define "duemq.checkShards" -}}
{{- $name := printf "%s-timer-service" (include "duemq.fullname" .) }}
{{- $left := int .Values.timerService.replicas }}
{{- range list $name (printf "%s-0" $name) }}
{{- with lookup "apps/v1" "StatefulSet" $.Release.Namespace . }}
{{- $arguments := join " " (first .spec.template.spec.containers).args }}
{{- if gt (regexFind "--shards=[0-9]+" $arguments | trimPrefix "--shards=" | int) $left }}
{{- fail (printf "timerService.replicas is %d, but shards that would go take delayed messages over, which then never fire: upgrade with timerService.shards=%d first (\"More or fewer shards\" in the chart's README)" $left $left) }}
{{- end }}
{{- end }}
{{- end }}
{{- end -}}

{{/* Of a role that keeps data: each of its pods must have an address of its own outside. */}}
{{- define "duemq.external.check" -}}
{{- $external := .root.Values.external }}
{{- $name := printf "external.%s" (ternary "timerService" .role (eq .role "timer-service")) }}
{{- $values := include "duemq.external.values" . | fromJson }}
{{- $pods := include "duemq.external.pods" . | fromJsonArray }}
{{- if not $values.host }}
{{- fail (printf "%s.host must be given: it is what clients outside are told, for instance b{ordinal}.mq.example.org" $name) }}
{{- end }}
{{- $hosts := list }}
{{- range $pods }}
{{- $host := include "duemq.external.host" (set . "host" $values.host) }}
{{- if regexMatch "[{}]" $host }}
{{- fail (printf "%s.host is %s: {ordinal} stands for a number and, with replicas, {replica}, and nothing else does" $name $values.host) }}
{{- end }}
{{- $hosts = append $hosts $host }}
{{- end }}
{{- if eq $external.type "LoadBalancer" }}
{{- if lt (uniq $hosts | len) (len $pods) }}
{{- fail (printf "%s.host is %s: %d pods would have one address; put {ordinal} into it, and with replicas {replica}" $name $values.host (len $pods)) }}
{{- end }}
{{- if $values.nodePorts }}
{{- fail (printf "%s.nodePorts is for external.type NodePort, which is LoadBalancer" $name) }}
{{- end }}
{{- else if lt (len $values.nodePorts) (len $pods) }}
{{- fail (printf "%s.nodePorts has %d, there are %d pods: clients outside are told a port of each" $name (len $values.nodePorts) (len $pods)) }}
{{- end }}
{{- end -}}

{{/* By whatever template is made first: they have no order. */}}
{{- define "duemq.external.checkAll" -}}
{{- $external := .Values.external }}
{{- include "duemq.external.check" (dict "root" . "role" "broker" "values" .Values.broker "size" .Values.broker.replicasPerBroker) }}
{{- include "duemq.external.check" (dict "root" . "role" "timer-service" "values" .Values.timerService "size" .Values.timerService.replicasPerShard) }}
{{- if eq $external.type "LoadBalancer" }}
{{- if $external.nameserver.nodePort }}
{{- fail "external.nameserver.nodePort is for external.type NodePort, which is LoadBalancer" }}
{{- end }}
{{- else if $external.loadBalancerSourceRanges }}
{{- fail "external.loadBalancerSourceRanges is for external.type LoadBalancer, which is NodePort: nobody would be kept out; see networkPolicy.externalClients" }}
{{- end }}
{{- if contains "{" $external.nameserver.host }}
{{- fail (printf "external.nameserver.host is %s: one Service is of all nameservers, no number stands in it" $external.nameserver.host) }}
{{- end }}
{{- $taken := dict }}
{{- range concat (list $external.nameserver.nodePort) $external.broker.nodePorts $external.timerService.nodePorts }}
{{- if . }}
{{- $port := int . | toString }}
{{- if hasKey $taken $port }}
{{- fail (printf "external: node port %s is there twice, of two Services" $port) }}
{{- end }}
{{- $_ := set $taken $port true }}
{{- end }}
{{- end }}
{{- range $name, $values := dict "nameserver" .Values.nameserver "broker" .Values.broker "timerService" .Values.timerService }}
{{- $port := (get $external $name).port | int }}
{{- $others := list (int $values.port) }}
{{- if $.Values.metrics.enabled }}{{ $others = append $others (int $values.metricsPort) }}{{ end }}
{{- if $.Values.tls.secretName }}{{ $others = append $others (int $.Values.tls.healthPort) }}{{ end }}
{{- if has $port $others }}
{{- fail (printf "external.%s.port is %d, which is another port of its pods" $name $port) }}
{{- end }}
{{- end }}
{{- end -}}

{{/* Of the values that belong to no role. */}}
{{- define "duemq.check" -}}
{{- $fullname := include "duemq.fullname" . }}
{{- if and (regexMatch "^[0-9]" $fullname) (semverCompare "<1.37.0-0" .Capabilities.KubeVersion.Version) }}
{{- fail (printf "%s: Kubernetes %s wants names of Services that begin with a letter: set fullnameOverride" $fullname .Capabilities.KubeVersion.Version) }}
{{- end }}
{{- if and .Values.tls.verifyClients (not .Values.tls.secretName) }}
{{- fail "tls.verifyClients needs tls.secretName: without TLS everybody would be served" }}
{{- end }}
{{- if and .Values.metrics.serviceMonitor.enabled (not .Values.metrics.enabled) }}
{{- fail "metrics.serviceMonitor.enabled needs metrics.enabled: there would be nothing to scrape" }}
{{- end }}
{{- if and (default dict .Values.metrics.prometheusRule).enabled (not .Values.metrics.enabled) }}
{{- fail "metrics.prometheusRule.enabled needs metrics.enabled: no alert would ever fire" }}
{{- end }}
{{- if and (default dict .Values.metrics.dashboard).enabled (not .Values.metrics.enabled) }}
{{- fail "metrics.dashboard.enabled needs metrics.enabled: it would stay empty" }}
{{- end }}
{{- if and .Values.traces.report.enabled .Values.traces.landing.enabled (has "ReadWriteOncePod" .Values.traces.persistence.accessModes) }}
{{- fail "traces.persistence.accessModes is ReadWriteOncePod, but both traces.landing and traces.report need the volume: no report would ever start" }}
{{- end }}
{{- if (.Values.external).enabled }}
{{- include "duemq.external.checkAll" . }}
{{- end }}
{{- $kept := 0.0 }}
{{- range regexFindAll "[0-9.]+[a-z]+" .Values.traces.keep -1 }}
{{- $kept = addf $kept (include "duemq.amount" . | float64) }}
{{- end }}
{{- if lt $kept 10800.0 }}
{{- fail (printf "traces.keep is %s, must be 3h or more: each run of the report would end with an error" .Values.traces.keep) }}
{{- end }}
{{- end -}}
