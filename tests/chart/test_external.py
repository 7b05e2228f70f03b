"""The external ports: a Service a pod, and what the process in the pod tells of itself."""

import pytest

from tests.chart.conftest import RefusedValuesError
from tests.chart.test_objects import POD_NAME, of_kind
from tests.chart.test_values import notes, sets_of, settings_of

NODE_PORTS = {
    "enabled": True,
    "broker": {"host": "mq.example.org", "nodePorts": [31000, 31001, 31002]},
    "timerService": {"host": "mq.example.org", "nodePorts": [31100]},
}
BALANCERS = {
    "enabled": True,
    "type": "LoadBalancer",
    "broker": {"host": "b{ordinal}.mq.example.org"},
    "timerService": {"host": "t{ordinal}.mq.example.org"},
}


def services(objects):
    """By the pod that each leads to, or the role."""
    found = {}
    for one in of_kind(objects, "Service"):
        if one["metadata"]["name"].endswith("-ext"):
            selector = one["spec"]["selector"]
            found[selector.get(POD_NAME, selector["app.kubernetes.io/component"])] = one
    return found


def told(objects, tmp_path):
    """What each pod's process tells of itself; of nameservers nothing."""
    found = {}
    for role in ("broker", "timer-service"):
        for one in sets_of(objects, role):
            for index in range(one["spec"]["replicas"]):
                settings = settings_of(one, role, index, tmp_path)
                found[f"{one['metadata']['name']}-{index}"] = settings.external_advertised
    return found


@pytest.mark.parametrize("values", ["external", "external-replicated"])
def test_a_pod_tells_where_its_service_is(helm, values, tmp_path):
    objects = helm.template(values)
    found, addresses = services(objects), told(objects, tmp_path)
    assert set(found) == {*addresses, "nameserver"}
    assert len(set(addresses.values())) == len(addresses)
    for pod, address in addresses.items():
        host, _, port = address.rpartition(":")
        [served] = found[pod]["spec"]["ports"]
        assert int(port) == served.get("nodePort", served["port"])
        assert found[pod]["spec"]["publishNotReadyAddresses"] is True
        named = found[pod]["metadata"].get("annotations", {}).values()
        assert list(named) == ([host] if values == "external-replicated" else [])
    assert "publishNotReadyAddresses" not in found["nameserver"]["spec"]


def test_replicas_have_addresses_of_their_own(helm4, tmp_path):
    addresses = told(helm4.template("external-replicated"), tmp_path)
    assert addresses["test-duemq-broker-1-2"] == "b1-2.mq.example.org:443"
    assert addresses["test-duemq-timer-service-0-1"] == "t0-1.mq.example.org:9873"
    ports = {
        "broker": {"replicasPerBroker": 2},
        "external": {
            **NODE_PORTS,
            "broker": {"host": "b{ordinal}.org", "nodePorts": [1, 2, 3, 4]},
        },
    }
    addresses = told(helm4.template(overrides=ports), tmp_path)
    assert [addresses[f"test-duemq-broker-{n}-{m}"] for n in (0, 1) for m in (0, 1)] == [
        f"b{port > 2:d}.org:{port}" for port in (1, 2, 3, 4)
    ]


def test_a_pod_to_come_restarts_no_other(helm4):
    """Where its port is known, or its host is a pattern."""
    for external in (NODE_PORTS, BALANCERS):
        two, three = (
            helm4.template(overrides={"external": external, "broker": {"replicas": replicas}})
            for replicas in (2, 3)
        )
        [before], [after] = sets_of(two, "broker"), sets_of(three, "broker")
        assert before["spec"]["template"] == after["spec"]["template"]


def test_without_it_there_is_no_port(helm4):
    objects = helm4.template()
    assert services(objects) == {}
    assert "external" not in str(objects)


def test_the_policy_says_who_comes_from_outside(helm4):
    [policy] = of_kind(helm4.template("external"), "NetworkPolicy")
    rules = {rule["ports"][0]["port"]: rule for rule in policy["spec"]["ingress"]}
    assert rules["external"]["from"] == [{"ipBlock": {"cidr": "10.0.0.0/8"}}]
    assert "from" not in rules["grpc"]


def changed(base, **more):
    return {
        **base,
        **{
            key: {**base.get(key, {}), **value} if isinstance(value, dict) else value
            for key, value in more.items()
        },
    }


@pytest.mark.parametrize(
    ("external", "more", "text"),
    [
        ({"enabled": True}, {}, "external.broker.host must be given"),
        (changed(NODE_PORTS, timerService={"host": ""}), {}, "external.timerService.host must"),
        (NODE_PORTS, {"broker": {"replicas": 4}}, "external.broker.nodePorts has 3, there are 4"),
        (
            NODE_PORTS,
            {"timerService": {"replicasPerShard": 2}},
            "external.timerService.nodePorts has 1, there are 2",
        ),
        (
            changed(NODE_PORTS, timerService={"nodePorts": [31002]}),
            {},
            "node port 31002 is there twice",
        ),
        (changed(NODE_PORTS, nameserver={"nodePort": 31000}), {}, "31000 is there twice"),
        (
            changed(NODE_PORTS, broker={"host": "b{replica}.org"}),
            {},
            "external.broker.host is b{replica}.org: {ordinal} stands",
        ),
        (
            changed(NODE_PORTS, nameserver={"host": "ns{ordinal}.org"}),
            {},
            "external.nameserver.host is ns{ordinal}.org",
        ),
        (
            changed(BALANCERS, broker={"host": "mq.example.org"}),
            {},
            "external.broker.host is mq.example.org: 2 pods would have one address",
        ),
        (BALANCERS, {"broker": {"replicasPerBroker": 2}}, "4 pods would have one address"),
        (
            changed(BALANCERS, broker={"nodePorts": [1, 2]}),
            {},
            "external.broker.nodePorts is for external.type NodePort",
        ),
        (
            changed(BALANCERS, nameserver={"nodePort": 31000}),
            {},
            "external.nameserver.nodePort is for external.type NodePort",
        ),
        (
            changed(NODE_PORTS, loadBalancerSourceRanges=["10.0.0.0/8"]),
            {},
            "external.loadBalancerSourceRanges is for external.type LoadBalancer",
        ),
        (changed(NODE_PORTS, broker={"port": 9870}), {}, "external.broker.port is 9870, which is"),
        (
            changed(NODE_PORTS, nameserver={"port": 9886}),
            {},
            "external.nameserver.port is 9886, which is",
        ),
        (
            changed(NODE_PORTS, timerService={"port": 9890}),
            {"tls": {"secretName": "x"}},
            "external.timerService.port is 9890, which is",
        ),
        (changed(NODE_PORTS, broker={"host": "a b"}), {}, "host"),
        (changed(NODE_PORTS, type="ClusterIP"), {}, "type"),
    ],
)
def test_what_cannot_work_is_refused_by_name(helm4, external, more, text):
    with pytest.raises(RefusedValuesError) as caught:
        helm4.template(overrides={"external": external, **more})
    assert text in str(caught.value)


def test_whoever_installs_is_told_what_clients_outside_name(helm4):
    named = changed(NODE_PORTS, nameserver={"host": "mq.example.org", "nodePort": 31900})
    assert 'duemq.Producer("mq.example.org:31900")' in notes(helm4, {"external": named})
    balanced = changed(BALANCERS, nameserver={"host": "mq.example.org"})
    assert 'duemq.Producer("mq.example.org:9877")' in notes(helm4, {"external": balanced})
    unknown = notes(helm4, {"external": NODE_PORTS})
    assert 'duemq.Producer("HOST:PORT")' in unknown
    assert "get service test-duemq-nameserver-ext" in unknown
    assert "not enough\nfrom outside (external.enabled)." in notes(helm4, {})
