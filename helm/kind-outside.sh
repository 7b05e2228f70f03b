# Clients outside of kind-test.sh, which sources this: in a container beside the nodes, which knows no name of the cluster.

outside_port=31900

use_ports_of_nodes() { # from here on for what is installed
  outside=$(docker inspect -f '{{.NetworkSettings.Networks.kind.IPAddress}}' "$cluster-control-plane")
  values+=(--set "external.enabled=true,external.nameserver.host=$outside,external.nameserver.nodePort=$outside_port"
    --set "external.broker.host=$outside,external.broker.nodePorts={31000,31001,31002,31003,31004,31005}"
    --set "external.timerService.host=$outside,external.timerService.nodePorts={31100}")
}

duemq_outside() { # ARGUMENT...: of `duemq`
  docker run --rm --network kind "$image" duemq --nameserver "$outside:$outside_port" "$@"
}

serves_outside() {
  local received
  duemq_outside --timeout 60 send kind-outside now
  duemq_outside send kind-outside soon --delay 3s
  duemq_outside send kind-outside never --delay 1h --timer-key late
  duemq_outside timer cancel --topic kind-outside --timer-key late
  received=$(duemq_outside consume kind-outside --group kind-outside --from earliest --count 2 --idle-timeout 60 --raw)
  [ "$(sort <<<"$received")" = $'now\nsoon' ] || die "received outside: $received"
}
