{{/* Of the external ports: what the pods are told, and their Services.  A role as in _role.tpl. */}}

{{/* The values of a role's external port. */}}
{{- define "duemq.external.values" -}}
{{- get .root.Values.external (ternary "timerService" .role (eq .role "timer-service")) | toJson -}}
{{- end -}}

{{/* The pods of a role that keeps data, as JSON: pod, process (its name among others), ordinal, replica. */}}
{{- define "duemq.external.pods" -}}
{{- $role := . -}}
{{- $set := printf "%s-%s" (include "duemq.fullname" .root) .role -}}
{{- $pods := list -}}
{{- range $ordinal := until (int .values.replicas) -}}
{{- if include "duemq.role.replicated" $role -}}
{{- range $replica := until (int $role.size) -}}
{{- $pods = append $pods (dict "pod" (printf "%s-%d-%d" $set $ordinal $replica) "process" (printf "%s-%d/%d" $set $ordinal $replica) "ordinal" $ordinal "replica" $replica) -}}
{{- end -}}
{{- else -}}
{{- $pod := printf "%s-%d" $set $ordinal -}}
{{- $pods = append $pods (dict "pod" $pod "process" $pod "ordinal" $ordinal) -}}
{{- end -}}
{{- end -}}
{{- toJson $pods -}}
{{- end -}}

{{/* A host with the numbers of a pod; dict host, ordinal, and replica where there are any. */}}
{{- define "duemq.external.host" -}}
{{- $host := replace "{ordinal}" (toString .ordinal) .host -}}
{{- if hasKey . "replica" }}{{ $host = replace "{replica}" (toString .replica) $host }}{{ end -}}
{{- $host -}}
{{- end -}}

{{/* Where a pod is reached: a pattern, or of NodePorts each pod's own; those that wait for pods to come, too. */}}
{{- define "duemq.external.advertise" -}}
{{- $external := include "duemq.external.values" . | fromJson -}}
{{- $addresses := list -}}
{{- if eq .root.Values.external.type "LoadBalancer" -}}
{{- $numbers := dict "host" $external.host "ordinal" "$(POD_INDEX)" -}}
{{- if .group }}{{ $numbers = dict "host" $external.host "ordinal" .index "replica" "$(POD_INDEX)" }}{{ end -}}
{{- $addresses = append $addresses (printf "%s:%d" (include "duemq.external.host" $numbers) (int $external.port)) -}}
{{- else if .group -}}
{{- range $replica := until (int .size) -}}
{{- $host := include "duemq.external.host" (dict "host" $external.host "ordinal" $.index "replica" $replica) -}}
{{- $port := index $external.nodePorts (add (mul $.index $.size) $replica | int) -}}
{{- $addresses = append $addresses (printf "%s/%d=%s:%d" $.group $replica $host (int $port)) -}}
{{- end -}}
{{- else -}}
{{- range $ordinal, $port := $external.nodePorts -}}
{{- $host := include "duemq.external.host" (dict "host" $external.host "ordinal" $ordinal) -}}
{{- $addresses = append $addresses (printf "%s-%d=%s:%d" (include "duemq.role.setName" $) $ordinal $host (int $port)) -}}
{{- end -}}
{{- end -}}
{{- join "," $addresses -}}
{{- end -}}

{{/* A Service; dict root, role, name, selector, port, host, nodePort (null: any). */}}
{{- define "duemq.external.service" -}}
{{- $external := .root.Values.external -}}
{{- $annotations := dict -}}
{{- range $key, $value := $external.annotations }}{{ $_ := set $annotations $key (replace "{host}" $.host $value) }}{{ end -}}
apiVersion: v1
kind: Service
metadata:
  {{- include "duemq.metadata" (dict "root" .root "role" .role "name" .name "annotations" $annotations) | nindent 2 }}
spec:
  type: {{ $external.type }}
  externalTrafficPolicy: {{ $external.externalTrafficPolicy }}
  {{- include "duemq.ipFamilies" .root | nindent 2 }}
  {{- with $external.loadBalancerSourceRanges }}
  loadBalancerSourceRanges:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .publishNotReady }}
  publishNotReadyAddresses: true
  {{- end }}
  selector:
    {{- toYaml .selector | nindent 4 }}
  ports:
    - name: grpc
      port: {{ .port }}
      targetPort: external
      {{- with .nodePort }}
      nodePort: {{ . }}
      {{- end }}
      protocol: TCP
      appProtocol: {{ include "duemq.appProtocol" .root }}
{{- end -}}
