# The case of kind-test.sh where machines are lost, which sources this.  Under load, the node of a broker's leader is drained,
# the node of its next one freezes and thaws again, and the node of a timer shard's leader loses its power.

leader_of() { # GROUP: its pod
  local holder
  holder=$(holder_of "$1")
  [ -n "$holder" ] && echo "$1-${holder%%/*}"
}

node_of() { kubectl -n "$namespace" get pod "$1" -o jsonpath='{.spec.nodeName}'; }

nodes_of() { # GROUP: how many nodes its replicas are on
  kubectl -n "$namespace" get pods -l "duemq/group=$1" -o jsonpath='{range .items[*]}{.spec.nodeName}{"\n"}{end}' | sort -u | wc -l
}

leads_elsewhere() { # GROUP POD
  local pod
  pod=$(leader_of "$1") && [ "$pod" != "$2" ]
}

is_whole() { # all nodes and all pods of the release; a pod that is replaced meanwhile ends a wait
  kubectl wait --for=condition=Ready node --all --timeout=5s >/dev/null 2>&1 &&
    kubectl -n "$namespace" wait --for=condition=Ready pod -l "app.kubernetes.io/instance=$release" --timeout=5s >/dev/null 2>&1
}

lose_node() { # GROUP HOW BACK: commands that take the node of its leader, away and back again
  local pod node began=$SECONDS
  pod=$(leader_of "$1")
  node=$(node_of "$pod")
  "$2" "$node"
  wait_until 60 "another one leads $1" leads_elsewhere "$1" "$pod"
  echo "$1: $(leader_of "$1") leads $((SECONDS - began)) s after $2 of $node, where $pod led"
  sleep 10
  "$3" "$node"
  wait_until 180 "all nodes and pods are ready" is_whole
  echo "$1: whole again $((SECONDS - began)) s after $2"
}

# --force: pods of the volumes' provisioner belong to nobody.
drain_node() { quietly kubectl drain "$1" --ignore-daemonsets --delete-emptydir-data --force --timeout=120s; }
uncordon_node() { kubectl uncordon "$1" >/dev/null; }
freeze_node() { docker pause "$1" >/dev/null; }
thaw_node() { docker unpause "$1" >/dev/null; }
kill_node() { docker kill "$1" >/dev/null; }
start_node() { docker start "$1" >/dev/null; }

nodes() {
  values=(-f helm/kind-values.yaml -f helm/kind-replicated-values.yaml
    --set nameserver.replicas=2,timerService.replicasPerShard=3,timerService.settings.min_insync=2
    --set "image.repository=${image%:*},image.tag=${image#*:},image.pullPolicy=Never")

  say "machines: helm install"
  helm install "$release" helm/duemq --namespace "$namespace" --create-namespace "${values[@]}" \
    --wait --timeout 240s >/dev/null
  kubectl -n "$namespace" get pods -o wide
  for group in "$release-broker-0" "$release-timer-service-0"; do
    [ "$(nodes_of "$group")" = 3 ] || die "the replicas of $group share a node"
  done

  local each="$release-nameserver-headless:9876"
  load_nameservers=$release-nameserver-0.$each,$release-nameserver-1.$each
  say "load; a node is drained, one freezes, one loses its power"
  run_load 150 "$cluster-control-plane"
  echo "load from $SECONDS s on"
  sleep 8
  lose_node "$release-broker-0" drain_node uncordon_node
  lose_node "$release-broker-0" freeze_node thaw_node
  lose_node "$release-timer-service-0" kill_node start_node
  await_load
  kubectl -n "$namespace" get pods,leases -o wide
}
