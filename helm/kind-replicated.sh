# The replicated case of kind-test.sh, which sources this.  Under load, the leaders of a broker and of a timer shard are killed and
# lose their volumes, the API server hangs for a minute, certificates are renewed, and all is rolled.  Without load, a Lease is deleted
# and a replica adopted.  All connections have TLS at both ends (kind-tls.sh).

holder_of() { kubectl -n "$namespace" get lease "$1" -o jsonpath='{.spec.holderIdentity}'; }

wait_until() { # SECONDS WHAT COMMAND...
  local until=$((SECONDS + $1)) what=$2
  shift 2
  until "$@"; do
    [ "$SECONDS" -lt "$until" ] || die "it did not come true: $what"
    sleep 0.5
  done
}

is_replaced() { # CLAIM UID POD: a claim of another uid is bound, and the pod is ready
  local uid
  uid=$(kubectl -n "$namespace" get pvc "$1" --ignore-not-found -o jsonpath='{.metadata.uid}')
  if [ -z "$uid" ]; then # the set makes claims only with pods
    kubectl -n "$namespace" delete pod "$3" --ignore-not-found --grace-period=0 --force >/dev/null 2>&1 || true
    return 1
  fi
  [ "$uid" != "$2" ] && kubectl -n "$namespace" wait --for=condition=Ready "pod/$3" --timeout=1s >/dev/null 2>&1
}

lose_leader_and_volume() { # GROUP COMMAND
  local holder pod claim uid
  holder=$(holder_of "$1")
  [ -n "$holder" ] || die "nobody leads $1"
  pod=$1-${holder%%/*}
  claim=data-$pod
  uid=$(kubectl -n "$namespace" get pvc "$claim" -o jsonpath='{.metadata.uid}')
  echo "$1: $holder leads; its pod and its volume go"
  kubectl -n "$namespace" delete pvc "$claim" --wait=false >/dev/null
  kill_process_of "$pod" "$2"
  kubectl -n "$namespace" delete pod "$pod" --grace-period=0 --force >/dev/null 2>&1
  wait_until 180 "$pod came back as a new disk and in sync" is_replaced "$claim" "$uid" "$pod"
  echo "$1: $(holder_of "$1") leads; $pod is a new disk and in sync"
}

signal_api_server() { # SIGNAL
  docker exec "$cluster-control-plane" bash -c '
    for process in /proc/[0-9]*; do
      tr "\0" " " <"$process/cmdline" 2>/dev/null | grep -qE -- "^[^ ]*kube-apiserver " && kill "-$1" "${process#/proc/}" && exit 0
    done
    exit 1' kill "$1"
}

nobody_leads() { # GROUP POD: it says that an operator must decide
  kubectl -n "$namespace" exec "$2" -- duemq replica status 127.0.0.1:9870 2>/dev/null | grep -q "adopt"
}

has_holder() { [ -n "$(holder_of "$1" 2>/dev/null)" ]; }

lose_lease() { # GROUP
  local pod
  pod=$1-$(holder_of "$1" | cut -d/ -f1)
  kubectl -n "$namespace" delete lease "$1" >/dev/null
  wait_until 60 "without its Lease nobody leads $1" nobody_leads "$1" "$pod"
  kubectl -n "$namespace" exec "$pod" -- duemq replica adopt 127.0.0.1:9870 --yes --nameserver "$load_nameservers"
  wait_until 60 "$1 is led again" has_holder "$1"
  kubectl -n "$namespace" wait --for=condition=Ready pod -l "duemq/group=$1" --timeout=120s >/dev/null
}

replicated() {
  values=(-f helm/kind-values.yaml -f helm/kind-replicated-values.yaml
    --set "image.repository=${image%:*},image.tag=${image#*:},image.pullPolicy=Never")

  say "replicas, with TLS: helm install, helm test"
  use_tls
  helm install "$release" helm/duemq --namespace "$namespace" --create-namespace "${values[@]}" \
    --wait --timeout 240s >/dev/null
  kubectl -n "$namespace" get pods,leases
  helm test "$release" --namespace "$namespace" --timeout 180s >/dev/null

  say "load; leaders are deleted with their volumes, then all pods are rolled"
  run_load 240
  echo "load from $SECONDS s on"
  renew_certificate
  sleep 8
  lose_leader_and_volume "$release-broker-0" duemq-broker
  lose_leader_and_volume "$release-timer-service-0" duemq-timer-service
  echo "the API server hangs from $SECONDS s on"
  signal_api_server STOP
  sleep 60
  signal_api_server CONT
  wait_until 120 "the API server answers" kubectl get --raw /readyz >/dev/null 2>&1
  wait_until 180 "the nameserver serves the renewed certificate" serves_certificate "$release-nameserver-0" 9876
  echo "rolled from $SECONDS s on"
  helm upgrade "$release" helm/duemq --namespace "$namespace" "${values[@]}" \
    --set broker.settings.checkpoint_interval=9s,timerService.settings.near_window=30s --wait --timeout 300s >/dev/null
  echo "rolled at $SECONDS s"
  await_load
  kubectl -n "$namespace" get pods,leases

  say "the Lease of a broker is deleted; a replica is adopted"
  lose_lease "$release-broker-0"
  helm test "$release" --namespace "$namespace" --timeout 180s >/dev/null
  kubectl -n "$namespace" get leases
  kubectl -n "$namespace" delete secret duemq-tls duemq-load >/dev/null
  unset load_nameservers load_env load_mount load_volume
}
