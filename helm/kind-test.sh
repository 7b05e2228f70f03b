#!/bin/bash
# Builds the image, installs the chart on a new kind cluster, runs `helm test`, a client outside of it (kind-outside.sh), kills and upgrades it under load, checks
# that nothing acknowledged was lost, uninstalls; the same with replicas, whose leaders lose their volumes (kind-replicated.sh),
# and machines that are drained, freeze and die (kind-nodes.sh); deletes the cluster.  KIND_CASES: some of `plain replicated nodes`.  Needs docker, kind, kubectl, helm and openssl, and the wheelhouse
# of kind-prepare.sh; no network.  KIND_NODE_IMAGE and BASE_IMAGE name other images than kind's and the Dockerfile's own;
# KIND_KEEP=1 leaves the cluster.
set -eEuo pipefail
cd "$(dirname "$0")/.."

# Why it ends, said last: what the cluster looked like is long.
failure=
trap 'failure=${failure:-"${BASH_SOURCE[0]}:$LINENO: $BASH_COMMAND"}' ERR

say() { printf '\n=== %s (%ss)\n' "$*" "$SECONDS"; }
die() { failure=$*; printf 'kind-test: %s\n' "$*" >&2; exit 1; }

quietly() { # COMMAND...: what it printed shows when it fails
  local printed
  printed=$("$@" 2>&1) || { printf '%s\n' "$printed" >&2; return 1; }
}

missing=()
for tool in docker kind kubectl helm openssl; do
  command -v "$tool" >/dev/null || missing+=("$tool")
done
[ ${#missing[@]} -eq 0 ] || die "missing on the PATH: ${missing[*]}"
docker info >/dev/null 2>&1 || die "docker is there, but its daemon does not answer"
compgen -G 'wheelhouse/duemq_server-*.whl' >/dev/null || die "no wheelhouse: run \`make kind-prepare\` first"

beside=$(docker ps --format '{{.Names}}')
[ -z "$beside" ] || printf 'beside other containers:\n%s\n' "$beside"

cluster=duemq-$$
image=duemq:kind-$$
work=$(mktemp -d)
# Of its own, so that the current context of whoever runs this stays what it is.
export KUBECONFIG=$work/kubeconfig
release=duemq
namespace=messages
cases=${KIND_CASES:-plain replicated nodes}
. helm/kind-tls.sh
. helm/kind-outside.sh
. helm/kind-replicated.sh
. helm/kind-nodes.sh

diagnose() {
  say "what the cluster looked like"
  kubectl get pods,pvc -A -o wide || true
  kubectl -n "$namespace" get events --sort-by=.lastTimestamp | tail -40 || true
  for pod in $(kubectl -n "$namespace" get pods -o name 2>/dev/null); do
    echo "--- $pod"
    kubectl -n "$namespace" logs "$pod" --all-containers --tail=60 || true
    kubectl -n "$namespace" logs "$pod" --all-containers --tail=60 --previous 2>/dev/null || true
  done
}

cleanup() {
  status=$?
  trap - EXIT INT TERM
  [ "$status" -eq 0 ] || diagnose
  if [ -z "${KIND_KEEP:-}" ]; then
    kind delete cluster --name "$cluster" >/dev/null 2>&1 || true
    docker image rm -f "$image" >/dev/null 2>&1 || true
    rm -rf "$work"
  else
    echo "kept: KUBECONFIG=$KUBECONFIG; kind delete cluster --name $cluster"
  fi
  [ "$status" -eq 0 ] || printf 'kind-test failed after %s s: %s\n' "$SECONDS" "$failure" >&2
  exit "$status"
}
trap cleanup EXIT
trap 'failure=interrupted; exit 130' INT TERM

# SIGKILL for the process of a pod, from its node: what an out-of-memory kill or a crash is.
kill_process_of() {
  local pod=$1 command=$2 node
  node=$(kubectl -n "$namespace" get pod "$pod" -o jsonpath='{.spec.nodeName}')
  docker exec "$node" bash -c '
    for process in /proc/[0-9]*; do
      if tr "\0" " " <"$process/cmdline" 2>/dev/null | grep -q -- "/$2 " &&
         tr "\0" "\n" <"$process/environ" 2>/dev/null | grep -qx "POD_NAME=$1"; then
        kill -9 "${process#/proc/}" && exit 0
      fi
    done
    exit 1' kill "$pod" "$command"
}

run_load() { # SECONDS [NODE]: on this node, if any, whatever its taints are
  kubectl -n "$namespace" create configmap load --from-file=load.py=helm/kind-load.py >/dev/null
  kubectl -n "$namespace" apply -f - >/dev/null <<POD
apiVersion: v1
kind: Pod
metadata: {name: load}
spec:
  restartPolicy: Never
  nodeName: "${2:-}"
  enableServiceLinks: false
  securityContext: {runAsNonRoot: true, runAsUser: 10001, seccompProfile: {type: RuntimeDefault}}
  containers:
    - name: load
      image: $image
      imagePullPolicy: Never
      command: [python, /load/load.py]
      env: [{name: NAMESERVERS, value: "${load_nameservers:-$release-nameserver:9876}"}, {name: LOAD_SECONDS, value: "$1"}${load_env:-}]
      volumeMounts: [{name: load, mountPath: /load}${load_mount:-}]
  volumes: [{name: load, configMap: {name: load}}${load_volume:-}]
POD
  kubectl -n "$namespace" wait --for=condition=Ready pod/load --timeout=60s >/dev/null
}

await_load() {
  if ! kubectl -n "$namespace" wait --for=jsonpath='{.status.phase}'=Succeeded pod/load --timeout=420s; then
    die "the load failed: see its log"
  fi
  kubectl -n "$namespace" logs load --tail=5
}

uninstall() {
  say "helm uninstall"
  kubectl -n "$namespace" delete pod/load configmap/load >/dev/null
  helm uninstall "$release" --namespace "$namespace" --wait --timeout 120s >/dev/null
  kubectl -n "$namespace" wait --for=delete pod -l "app.kubernetes.io/instance=$release" --timeout=120s
  [ -z "$(kubectl -n "$namespace" get statefulset,service,configmap,role -l "app.kubernetes.io/instance=$release" -o name)" ] \
    || die "helm uninstall left something behind"
  # What it leaves on purpose: messages, and who leads.
  kubectl -n "$namespace" delete pvc -l "app.kubernetes.io/instance=$release" >/dev/null
  kubectl -n "$namespace" delete lease -l app.kubernetes.io/managed-by=duemq >/dev/null
}

is_refused() { # VALUE WHY: an upgrade with it
  local refusal
  if refusal=$(helm upgrade "$release" helm/duemq --namespace "$namespace" "${values[@]}" \
      --set "$1" --dry-run=server 2>&1 >/dev/null); then
    die "an upgrade to $1 was not refused"
  fi
  [[ $refusal == *"$2"* ]] || die "refused for another reason: $refusal"
}

plain() {
  values=(-f helm/kind-values.yaml
    --set "image.repository=${image%:*},image.tag=${image#*:},image.pullPolicy=Never")
  use_ports_of_nodes

  say "helm install"
  helm install "$release" helm/duemq --namespace "$namespace" --create-namespace "${values[@]}" \
    --wait --timeout 180s >/dev/null
  kubectl -n "$namespace" get pods

  say "helm test"
  helm test "$release" --namespace "$namespace" --timeout 180s

  say "a client outside"
  serves_outside

  say "replicas that would begin without the data, and other volumes, are refused"
  is_refused broker.replicasPerBroker=3 "the claim data-$release-broker-0 has data"
  is_refused broker.persistence.size=2Gi "persistence.size is 2Gi, of the StatefulSet $release-broker 1Gi"

  say "load; a broker's pod is deleted, other processes are killed, then all pods are rolled"
  run_load 75
  sleep 8
  kubectl -n "$namespace" delete pod "$release-broker-0" --grace-period=0 --force 2>/dev/null
  sleep 12
  kill_process_of "$release-broker-1" duemq-broker
  kill_process_of "$release-timer-service-0" duemq-timer-service
  sleep 10
  helm upgrade "$release" helm/duemq --namespace "$namespace" "${values[@]}" \
    --set nameserver.settings.expiry=20s,broker.settings.checkpoint_interval=9s \
    --set timerService.settings.near_window=30s --wait --timeout 240s >/dev/null
  await_load
  kubectl -n "$namespace" get pods
}

say "image"
docker build -q ${BASE_IMAGE:+--build-arg "BASE_IMAGE=$BASE_IMAGE"} -t "$image" .
docker run --rm --read-only --cap-drop ALL --network none "$image" duemq --help >/dev/null

say "cluster"
kind create cluster --name "$cluster" --config helm/kind-cluster.yaml ${KIND_NODE_IMAGE:+--image "$KIND_NODE_IMAGE"} --wait 180s -q
kind load docker-image "$image" --name "$cluster" -q

for case in $cases; do
  "$case"
  uninstall
done
say "passed"
