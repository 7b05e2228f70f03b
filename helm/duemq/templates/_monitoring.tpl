{{/* What Prometheus and Grafana are given: texts from files/, in which <…> stands for selectors and numbers of the release. */}}

{{/* dict root, file: the file's text for this release.  Pods are told by their names, whoever scrapes them. */}}
{{- define "duemq.monitoring.text" -}}
{{- $values := .root.Values -}}
{{- $rule := default dict $values.metrics.prometheusRule -}}
{{- $fullname := include "duemq.fullname" .root -}}
{{- $selectors := dict "nameservers" "nameserver" "brokers" "broker" "timers" "timer-service" -}}
{{- $_ := set $selectors "replicas" "(broker|timer-service)" -}}
{{- $_ := set $selectors "pods" "(nameserver|broker|timer-service)" -}}
{{- $text := .root.Files.Get .file -}}
{{- range $name, $role := $selectors -}}
{{- $selector := printf "namespace=\"%s\", pod=~\"%s-%s-[0-9-]+\"" $.root.Release.Namespace $fullname $role -}}
{{- $text = replace (printf "<%s>" $name) $selector $text -}}
{{- end -}}
{{- $numbers := dict "broker count" $values.broker.replicas "timer count" $values.timerService.replicas -}}
{{- $_ := set $numbers "lateness ms" $rule.latenessMs -}}
{{- $_ := set $numbers "lag seconds" $rule.consumerLagSeconds -}}
{{- $clocks := default "250ms" $values.timerService.settings.clock_difference_max -}}
{{- $_ := set $numbers "clock seconds" (include "duemq.amount" $clocks) -}}
{{- range $name, $number := $numbers -}}
{{- $text = replace (printf "<%s>" $name) (toString $number) $text -}}
{{- end -}}
{{- $text -}}
{{- end -}}
