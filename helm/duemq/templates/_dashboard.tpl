{{/* The dashboard as Grafana reads it: three panels beside one another, a row of its own for each chapter. */}}
{{- define "duemq.monitoring.dashboard" -}}
{{- $datasource := dict "type" "prometheus" "uid" "${datasource}" -}}
{{- $panels := list -}}
{{- $y := 0 -}}
{{- range include "duemq.monitoring.text" (dict "root" . "file" "files/dashboard.yaml") | fromYamlArray -}}
{{- $panels = append $panels (dict "id" (len $panels | add1) "type" "row" "title" .row "collapsed" false "panels" list "gridPos" (dict "h" 1 "w" 24 "x" 0 "y" $y)) -}}
{{- $y = add $y 1 -}}
{{- range $index, $panel := .panels -}}
{{- $targets := list -}}
{{- range $legend, $expression := $panel.queries -}}
{{- $targets = append $targets (dict "refId" (printf "q%d" (len $targets)) "expr" $expression "legendFormat" $legend "datasource" $datasource) -}}
{{- end -}}
{{- $place := dict "h" 8 "w" 8 "x" (mul 8 (mod $index 3)) "y" (add $y (mul 8 (div $index 3))) -}}
{{- $defaults := dict "unit" $panel.unit "custom" (dict "fillOpacity" 10 "showPoints" "never") -}}
{{- $panels = append $panels (dict "id" (len $panels | add1) "type" "timeseries" "title" $panel.title "gridPos" $place "datasource" $datasource "targets" $targets "fieldConfig" (dict "defaults" $defaults "overrides" list)) -}}
{{- end -}}
{{- $y = add $y (mul 8 (div (add 2 (len .panels)) 3)) -}}
{{- end -}}
{{- $name := printf "%s/%s" .Release.Namespace (include "duemq.fullname" .) -}}
{{- $choice := dict "name" "datasource" "label" "Data source" "type" "datasource" "query" "prometheus" -}}
{{- $dashboard := dict "title" (printf "DueMQ %s" $name) "uid" (printf "duemq-%s" (sha256sum $name | trunc 16)) "tags" (list "duemq") -}}
{{- $_ := merge $dashboard (dict "schemaVersion" 39 "editable" true "refresh" "30s" "time" (dict "from" "now-1h" "to" "now") "templating" (dict "list" (list $choice)) "panels" $panels) -}}
{{- toPrettyJson $dashboard -}}
{{- end -}}
