# The replicated case of kind-test.sh, which sources this: under load, the pod of a broker's leader is deleted with its volume,
# then all is rolled.

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

lose_leader_and_volume() { # GROUP
  local holder pod claim uid
  holder=$(holder_of "$1")
  [ -n "$holder" ] || die "nobody leads $1"
  pod=$1-${holder%%/*}
  claim=data-$pod
  uid=$(kubectl -n "$namespace" get pvc "$claim" -o jsonpath='{.metadata.uid}')
  echo "$1: $holder leads; its pod and its volume go"
  kubectl -n "$namespace" delete pvc "$claim" --wait=false >/dev/null
  kubectl -n "$namespace" delete pod "$pod" --grace-period=0 --force >/dev/null 2>&1
  wait_until 180 "$pod came back as a new disk and in sync" is_replaced "$claim" "$uid" "$pod"
  echo "$1: $(holder_of "$1") leads; $pod is a new disk and in sync"
}

replicated() {
  values=(-f helm/kind-values.yaml -f helm/kind-replicated-values.yaml
    --set "image.repository=${image%:*},image.tag=${image#*:},image.pullPolicy=Never")

  say "replicas: helm install, helm test"
  helm install "$release" helm/duemq --namespace "$namespace" --create-namespace "${values[@]}" \
    --wait --timeout 240s >/dev/null
  kubectl -n "$namespace" get pods,leases
  helm test "$release" --namespace "$namespace" --timeout 180s >/dev/null

  say "load; leaders are deleted with their volumes, then all pods are rolled"
  run_load 150
  sleep 8
  lose_leader_and_volume "$release-broker-0"
  lose_leader_and_volume "$release-timer-service-0"
  echo "rolled from $SECONDS s on"
  helm upgrade "$release" helm/duemq --namespace "$namespace" "${values[@]}" \
    --set broker.settings.checkpoint_interval=9s,timerService.settings.near_window=30s --wait --timeout 300s >/dev/null
  echo "rolled at $SECONDS s"
  await_load
  kubectl -n "$namespace" get pods,leases
}
