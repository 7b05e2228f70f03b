"""What values do, what they refuse, and that they reach the settings of the processes."""

import json
import re
import tomllib
from datetime import timedelta
from importlib import import_module
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from duemq_analytics import __main__ as command
from duemq_server.replication.settings import ReplicaSettings
from duemq_server.serving import settings as rpc_settings
from duemq_server.serving.permissions.rights import Action, Need, parse
from tests.chart.conftest import CHART, VALUES, RefusedValuesError

GOLDEN = Path(__file__).parent / "golden"
ROLES = {
    "nameserver": ("nameserver", "nameserver"),
    "broker": ("broker", "broker"),
    "timer-service": ("timer_service", "timerService"),
}
# What the chart itself decides.
MANAGED = {"listen", "advertise", "metrics_listen", "name", "data_dir", "nameservers"}
MANAGED |= {"replica", "replicas", "lease_store", "external_listen", "external_advertise"}
MANAGED |= {"lease_store_ca", "lease_store_cert", "lease_store_key"}
MANAGED |= {"tls_ca", "tls_cert", "tls_key", "tls_verify_clients", "permissions", "health_listen"}
MANAGED_BY_ROLE = {"timer-service": {"shard", "shards"}}


def settings_class(role):
    return import_module(f"duemq_server.{ROLES[role][0]}.settings").Settings


def free_settings(role):
    names = set(rpc_settings.names(settings_class(role)))
    return names - MANAGED - MANAGED_BY_ROLE.get(role, set())


def chart_values():
    return yaml.safe_load((CHART / "values.yaml").read_text())


def bytes_of(size):
    """Of 256Mi, 2Gi."""
    return int(size[:-2]) << {"Mi": 20, "Gi": 30}[size[-2:]]


def find(objects, kind, ending):
    (found,) = [
        one for one in objects if one["kind"] == kind and one["metadata"]["name"].endswith(ending)
    ]
    return found


def file_of(one):
    """The settings in a pod of that set, where it reads them."""
    template = one["spec"]["template"]
    [volume] = [each for each in template["spec"]["volumes"] if each["name"] == "config"]
    [item] = volume["downwardAPI"]["items"]
    assert item["path"] == "duemq.toml"
    field = re.fullmatch(r"metadata\.annotations\['(.+)'\]", item["fieldRef"]["fieldPath"])
    return template["metadata"]["annotations"][field[1]]


def config_of(objects, role):
    return tomllib.loads(file_of(sets_of(objects, role)[0]))


def sets_of(objects, role):
    return [
        one
        for one in objects
        if one["kind"] == "StatefulSet"
        and one["metadata"]["labels"]["app.kubernetes.io/component"] == role
    ]


def settings_of(one, role, index, tmp_path):
    """What the process in the pod of that ordinal reads."""
    (container,) = one["spec"]["template"]["spec"]["containers"]
    file = tmp_path / "duemq.toml"
    file.write_text(file_of(one))
    arguments = [
        argument.replace("$(POD_NAME)", f"{one['metadata']['name']}-{index}")
        .replace("$(POD_INDEX)", str(index))
        .replace("/etc/duemq/duemq.toml", str(file))
        for argument in container["args"]
    ]
    assert not any("$(" in argument for argument in arguments)
    environment = {each["name"]: each["value"] for each in container["env"] if "value" in each}
    return rpc_settings.read(settings_class(role), arguments, environment)


@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("role", ROLES)
def test_a_pods_command_and_file_are_settings_of_its_process(helm, role, values, tmp_path):
    objects = helm.template(values)
    one = sets_of(objects, role)[0]
    (container,) = one["spec"]["template"]["spec"]["containers"]
    assert container["command"] == [f"duemq-{role}"]
    read = settings_of(one, role, 0, tmp_path)
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert read.listen == f"0.0.0.0:{ports['grpc']}"
    assert read.advertise.endswith(f":{ports['grpc']}")
    services = [one["metadata"]["name"] for one in objects if one["kind"] == "Service"]
    for address in (read.advertise, *getattr(read, "nameservers", ())):
        pod, service, namespace, kind, *domain = address.partition(":")[0].split(".")
        assert (namespace, kind) == ("messages", "svc")
        assert service in services
        assert pod
        assert domain


@pytest.mark.parametrize(
    ("values", "role", "groups", "replicas", "store"),
    [
        ("replicated", "broker", 2, 3, "kubernetes"),
        ("replicated", "timer-service", 1, 2, "kubernetes"),
        ("replicated-etcd", "broker", 1, 2, "etcd:https://etcd-0.etcd:2379,"),
        ("replicated-etcd", "timer-service", 2, 3, "etcd:https://etcd-0.etcd:2379,"),
    ],
)
def test_a_group_is_a_set_of_replicas(helm, values, role, groups, replicas, store, tmp_path):
    objects = helm.template(values)
    sets = sets_of(objects, role)
    assert len(sets) == groups
    addresses = set()
    for number, one in enumerate(sets):
        assert one["spec"]["replicas"] == replicas
        names = [str(each) for each in range(replicas)]
        for index in range(replicas):
            read = settings_of(one, role, index, tmp_path)
            assert read.replicated
            assert read.name == one["metadata"]["name"] == f"test-duemq-{role}-{number}"
            assert (read.replica, list(read.replicas)) == (names[index], names)
            assert read.lease_store.startswith(store)
            over_tls = store.startswith("etcd:https")
            assert read.lease_store_key == ("/etc/lease-store/tls.key" if over_tls else "")
            addresses.add(read.advertise)
            if role == "timer-service":
                assert (read.shard, read.shards) == (number, groups)
    assert len(addresses) == groups * replicas


@pytest.mark.parametrize("scheme", ["", "https://"])
def test_an_etcd_may_have_ipv6_addresses(helm, scheme, tmp_path):
    store = f"etcd:{scheme}[fd00::1]:2379,{scheme}etcd-1:2379"
    given = {"leaseStore": store, "broker": {"replicasPerBroker": 3}}
    read = settings_of(sets_of(helm.template(overrides=given), "broker")[0], "broker", 0, tmp_path)
    assert read.etcd_endpoints == ["[fd00::1]:2379", "etcd-1:2379"]


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_shard_that_leaves_is_told_how_many_stay(helm, replicas, tmp_path):
    given = {"replicas": 4, "shards": 3, "replicasPerShard": replicas}
    objects = helm.template(overrides={"timerService": given})
    one = sets_of(objects, "timer-service")[-1]
    read = settings_of(one, "timer-service", 3 if replicas == 1 else 0, tmp_path)
    assert (read.shard, read.shards) == (3, 3)


@pytest.mark.parametrize(("values", "grouped"), [("default", False), ("replicated", True)])
def test_replicas_of_a_group_do_not_share_a_node(helm, values, grouped):
    objects = helm.template(values)
    for role in ("broker", "timer-service"):
        for one in sets_of(objects, role):
            template = one["spec"]["template"]
            [spread] = [
                each
                for each in template["spec"]["topologySpreadConstraints"]
                if each["topologyKey"] == "kubernetes.io/hostname"
            ]
            chosen = spread["labelSelector"]["matchLabels"]
            assert chosen.items() <= template["metadata"]["labels"].items()
            assert ("duemq/group" in chosen) == grouped
            assert (spread["whenUnsatisfiable"] == "DoNotSchedule") == grouped
            # A tainted node without a replica would keep all others from having two, for ever.
            assert (spread.get("nodeTaintsPolicy") == "Honor") == grouped


def test_settings_of_replicas_are_those_of_the_values(helm4, tmp_path):
    objects = helm4.template("replicated")
    read = settings_of(sets_of(objects, "broker")[0], "broker", 0, tmp_path)
    assert (read.min_insync, read.lease_duration, read.lag_max) == (2, 8, 5)
    assert read.catch_up_rate == 32 << 20


@pytest.mark.parametrize("values", ["default", "minimal"])
def test_without_replicas_the_objects_are_those_of_releases_that_had_none(helm, values):
    """Else an upgrade would restart everything, or could not change a StatefulSet."""
    specs = {
        f"{one['kind']}/{one['metadata']['name']}": one["spec"]
        for one in helm.template(values)
        if "spec" in one
    }
    for spec in specs.values():
        template = spec.get("template", {"metadata": {"annotations": {}}})
        template["metadata"]["annotations"].pop("duemq/settings", None)
    assert specs == yaml.safe_load((GOLDEN / f"{values}.yaml").read_text())


@pytest.mark.parametrize("role", ROLES)
def test_without_replicas_no_setting_is_of_replicas(helm4, role):
    config = config_of(helm4.template(), role)
    own = set(ReplicaSettings.__annotations__)
    assert set(config) == free_settings(role) - own
    if role != "nameserver":
        assert set(config_of(helm4.template("replicated"), role)) == free_settings(role)


@pytest.mark.parametrize("role", ROLES)
def test_every_setting_can_be_set_by_values_and_nothing_else(role):
    schema = json.loads((CHART / "values.schema.json").read_text())
    allowed = schema["properties"][ROLES[role][1]]["properties"]["settings"]
    assert set(allowed["properties"]) == free_settings(role)
    assert allowed["additionalProperties"] is False


@pytest.mark.parametrize("role", ROLES)
def test_values_show_every_setting_with_its_default(role, tmp_path):
    shown = chart_values()[ROLES[role][1]]["settings"]
    assert set(shown) == free_settings(role)
    kind = settings_class(role)
    fields = {field.name: field for field in kind.__dataclass_fields__.values()}
    file = tmp_path / "duemq.toml"
    # Logs of a container are for machines.
    lines = [f"{key} = {json.dumps(value)}" for key, value in shown.items() if key != "log_format"]
    file.write_text("\n".join(lines))
    needed = ["--name=n", "--data-dir=d"] if role != "nameserver" else []
    read = rpc_settings.read(kind, [f"--config={file}", *needed], {})
    for key in set(shown) - {"log_format", "drain_timeout"}:
        assert getattr(read, key) == fields[key].default, key


@pytest.mark.parametrize("role", ROLES)
def test_what_clients_have_not_read_fits_into_a_pod(role):
    """gRPC holds it twice; who is killed for it starts anew, and all ask it again at once."""
    values = chart_values()[ROLES[role][1]]
    unread, limit = values["settings"]["unsent_bytes_max"], values["resources"]["limits"]["memory"]
    assert bytes_of(unread.removesuffix("B")) * 2 < bytes_of(limit)


@pytest.mark.parametrize("role", ROLES)
def test_the_readmes_explain_every_setting(role):
    package = ROLES[role][0]
    text = (CHART.parents[1] / package / "README.md").read_text()
    missing = [n for n in rpc_settings.names(settings_class(role)) if f"`{n}`" not in text]
    assert not missing


def test_the_charts_readme_names_every_value():
    text = (CHART / "README.md").read_text()

    def paths(values, prefix=""):
        for key, value in values.items():
            if isinstance(value, dict) and value and key not in {"settings", "resources", "probes"}:
                yield from paths(value, f"{prefix}{key}.")
            else:
                yield f"{prefix}{key}"

    values = chart_values()
    wanted = set(paths({k: v for k, v in values.items() if k not in {"broker", "timerService"}}))
    wanted |= {f"broker.{path}" for path in paths(values["broker"])} - {
        f"broker.{path}" for path in paths(values["nameserver"])
    }
    assert not [path for path in sorted(wanted) if f"`{path}`" not in text]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"brokers": {}}, "brokers"),
        ({"broker": {"replica": 3}}, "replica"),
        ({"broker": {"replicas": 0}}, "replicas"),
        ({"broker": {"replicas": "two"}}, "replicas"),
        ({"broker": {"port": 70000}}, "port"),
        ({"broker": {"persistence": {"size": "20 GB"}}}, "size"),
        ({"broker": {"persistence": {"accessModes": ["ReadWriteMany"]}}}, "accessModes"),
        ({"broker": {"settings": {"flush": "sync"}}}, "flush"),
        ({"broker": {"settings": {"flush_mode": "never"}}}, "flush_mode"),
        ({"nameserver": {"settings": {"expiry": "soon"}}}, "expiry"),
        ({"nameserver": {"service": {"type": "ExternalName"}}}, "type"),
        ({"nameserver": {"podDisruptionBudget": {"minAvailable": 1}}}, "minAvailable"),
        ({"image": {"pullPolicy": "Sometimes"}}, "pullPolicy"),
        ({"image": {"tag": " "}}, "tag"),
        ({"image": {"digest": "latest"}}, "digest"),
        ({"timerService": {"updateStrategy": {"type": "Recreate"}}}, "updateStrategy"),
        ({"nameOverride": "Queue_"}, "nameOverride"),
        ({"tracing": {"otlp": {"endpoint": "collector:4317"}}}, "endpoint"),
        ({"tracing": {"otlp": {"headersSecret": {"name": "a/b"}}}}, "name"),
        ({"tracing": {"exporter": "otlp"}}, "exporter"),
        ({"traces": {"skipLost": "yes"}}, "skipLost"),
        ({"traces": {"report": {"activeDeadlineSeconds": 0}}}, "activeDeadlineSeconds"),
        ({"ipFamilyPolicy": "DualStack"}, "ipFamilyPolicy"),
        ({"ipFamilies": ["IPv4", "IPv4"]}, "ipFamilies"),
        ({"networkPolicy": {"enabled": True, "clients": "shop"}}, "clients"),
        ({"networkPolicy": {"monitors": [{}]}}, "monitors"),
        ({"broker": {"replicasPerBroker": 0}}, "replicasPerBroker"),
        ({"timerService": {"replicasPerShard": 8}}, "replicasPerShard"),
        ({"timerService": {"shards": 0}}, "shards"),
        ({"timerService": {"replicas": 2, "shards": 3}}, "shards is 3, of 2 replicas"),
        ({"timerService": {"replicasPerBroker": 2}}, "replicasPerBroker"),
        ({"leaseStore": "file:/tmp"}, "leaseStore"),
        ({"leaseStore": "etcd:"}, "leaseStore"),
        ({"rbac": {"rules": []}}, "rules"),
        ({"broker": {"replicasPerBroker": 2, "settings": {"min_insync": 3}}}, "min_insync is 3"),
        (
            {"broker": {"replicasPerBroker": 2, "settings": {"flush_mode": "async"}}},
            "broker: settings.flush_mode is async, with replicas it must be sync",
        ),
        (
            {"leaseStoreSecret": "certificates", "timerService": {"replicasPerShard": 2}},
            "leaseStoreSecret is certificates, leaseStore kubernetes: it is for etcd:https://",
        ),
        (
            {
                "leaseStoreSecret": "certificates",
                "leaseStore": "etcd:e:2379",
                "broker": {"replicasPerBroker": 3},
            },
            "leaseStoreSecret is certificates, leaseStore etcd:e:2379: it is for etcd:https://",
        ),
        ({"fullnameOverride": "x" * 37, "timerService": {"replicasPerShard": 2}}, "too long"),
        # Kubernetes labels pods with their set's name, a dash and up to ten characters.
        ({"fullnameOverride": "x" * 39}, "too long a name of a StatefulSet"),
        ({"broker": {"port": 9880}}, "broker: port and metricsPort are both 9880"),
        ({"broker": {"settings": {"message_bytes_max": "16MiB"}}}, "must be 1 to 8388608"),
        ({"broker": {"settings": {"session_timeout": "900ms"}}}, "session_timeout is 900ms"),
        ({"broker": {"settings": {"delay_levels": "1s, 5s"}}}, "delay_levels"),
        ({"broker": {"settings": {"retry_delays": ""}}}, "retry_delays"),
        ({"broker": {"settings": {"retry_delays": "1s " * 257}}}, "retry_delays"),
        ({"broker": {"settings": {"delay_levels": "1s " * 257}}}, "delay_levels"),
        (
            {"broker": {"settings": {"retry_delays": "10s 8785h"}}},
            "settings.retry_delays has 8785h, each must be 0 to 366 days",
        ),
        ({"timerService": {"settings": {"near_window": 70}}}, "near_window is 70, must be 1 to 65"),
        ({"timerService": {"settings": {"near_bytes_max": "9KiB"}}}, "must be at least 1048576"),
        ({"nameserver": {"settings": {"expiry": 0}}}, "nameserver: settings.expiry is 0"),
        ({"broker": {"persistence": {"size": "1Gi"}}}, "only whole ones are ever removed"),
        ({"timerService": {"persistence": {"size": "24Mi"}}}, "nothing would ever be accepted"),
        ({"tls": {"secretName": "a..b"}}, "secretName"),
        ({"leaseStoreSecret": "a/b"}, "leaseStoreSecret"),
        ({"tls": {"verifyClients": True}}, "tls.verifyClients needs tls.secretName"),
        (
            {"metrics": {"enabled": False, "serviceMonitor": {"enabled": True}}},
            "serviceMonitor.enabled needs metrics.enabled",
        ),
        (
            {
                "traces": {
                    "report": {"enabled": True},
                    "landing": {"enabled": True},
                    "persistence": {"accessModes": ["ReadWriteOncePod"]},
                }
            },
            "no report would ever start",
        ),
        (
            {"traces": {"report": {"enabled": True}, "keep": "2h59m"}},
            "traces.keep is 2h59m, must be 3h or more",
        ),
        # Not when somebody turns the report on, perhaps with another file of values.
        ({"traces": {"keep": "1h"}}, "traces.keep is 1h, must be 3h or more"),
        ({"leaseStore": "etcd:fd00::1:2379"}, "leaseStore"),
        # What is null is not there: pods would be told of no nameserver, shard or volume.
        ({"clusterDomain": None}, "clusterDomain"),
        ({"clusterDomain": "a..b"}, "clusterDomain"),
        ({"clusterDomain": "a.-b"}, "clusterDomain"),
        ({"leaseStore": None, "broker": {"replicasPerBroker": 3}}, "leaseStore"),
        ({"image": {"repository": None}}, "repository"),
        ({"nameserver": {"replicas": None}}, "replicas"),
        ({"timerService": {"replicas": None}}, "replicas"),
        ({"broker": {"persistence": {"enabled": None}}}, "enabled"),
        ({"traces": {"report": {"enabled": True, "since": None}}}, "since"),
    ],
)
def test_a_wrong_value_is_refused_by_name(helm, values, said):
    with pytest.raises(RefusedValuesError, match=said):
        helm.template(overrides=values)


def notes(helm, overrides):
    """What whoever installs is told; rendered without a cluster by Helm 4 alone."""
    command = ["install", "test", CHART, "--dry-run=client", "--namespace", "messages"]
    done = helm.run(*command, "--values", "-", input=yaml.dump(overrides))
    assert done.returncode == 0, done.stderr
    return done.stdout.partition("NOTES:")[2]


@pytest.mark.parametrize(
    ("replicas", "min_insync", "both", "alone"),
    [
        (1, 0, False, False),
        (2, 0, True, False),
        (2, 1, False, True),
        (3, 0, False, False),
        (3, 3, True, False),
        (3, 1, False, True),
    ],
)
def test_whoever_installs_is_told_what_replicas_do_not_survive(
    helm4, replicas, min_insync, both, alone
):
    settings = {"settings": {"min_insync": min_insync}}
    roles = {"broker": "replicasPerBroker", "timerService": "replicasPerShard"}
    for role, key in roles.items():
        told = notes(helm4, {role: {key: replicas, **settings}})
        stops = f"WARNING: {role}: all {replicas} replicas of a group must be there"
        assert (stops in told) == both
        risk = f"WARNING: {role}: settings.min_insync is 1"
        assert (risk in told) == alone


@pytest.mark.parametrize(
    ("period", "ready", "early"),
    [
        ("10s", "10s", False),
        ("10s", "9.5s", True),
        ("1m", "59s", True),
        ("1m", "1h", False),
        (10, "500ms", True),
        ("500ms", 1, False),
    ],
)
def test_whoever_installs_is_told_where_nameservers_answer_too_early(helm4, period, ready, early):
    settings = {"settings": {"heartbeat_period": period}}
    told = notes(
        helm4,
        {
            "broker": settings,
            "timerService": settings,
            "nameserver": {"settings": {"ready_after": ready}},
        },
    )
    for role in ("broker", "timerService"):
        line = f"WARNING: {role}.settings.heartbeat_period is {period},"
        assert (line in told) == early


def test_whoever_installs_is_told_names_that_a_certificate_is_for(helm4):
    """Those of the chart's README: a short one fails as soon as there is TLS."""
    told = re.findall(r"[\w.-]*nameserver[\w.-]*(?=:9876)", notes(helm4, {}))
    domain = "messages.svc.cluster.local"
    address = f"test-duemq-nameserver.{domain}"
    assert told.count(address) == 2
    assert all(each == address or each.endswith(f"-headless.{domain}") for each in told)


def test_lint_is_strictly_clean(helm):
    for values in VALUES:
        arguments = [] if values == "default" else ["-f", CHART / "ci" / f"{values}-values.yaml"]
        done = helm.run("lint", "--strict", CHART, *arguments)
        assert done.returncode == 0, done.stdout + done.stderr


def test_the_package_holds_no_test_values(helm, tmp_path):
    done = helm.run("package", CHART, "--destination", tmp_path)
    assert done.returncode == 0, done.stderr
    (package,) = tmp_path.glob("duemq-*.tgz")
    shown = helm.run("show", "all", package)
    assert "ReadWriteOncePod" not in shown.stdout


def test_a_probe_that_is_null_is_not_there(helm):
    given = {"broker": {"probes": {"liveness": None}}}
    template = find(helm.template(overrides=given), "StatefulSet", "broker")["spec"]["template"]
    [container] = template["spec"]["containers"]
    assert "livenessProbe" not in container
    assert container["readinessProbe"]["grpc"]["service"] == "duemq.v1.Broker"
    assert container["startupProbe"]["failureThreshold"] == 120


@pytest.mark.parametrize("values", ["probes", "resources"])
def test_probes_and_resources_that_are_null_are_none(helm, values):
    [one] = sets_of(helm.template(overrides={"broker": {values: None}}), "broker")
    [container] = one["spec"]["template"]["spec"]["containers"]
    assert not container.get("resources" if values == "resources" else "livenessProbe")


def test_an_older_kubernetes_is_refused(helm):
    with pytest.raises(RefusedValuesError, match="kubeVersion"):
        helm.template(arguments=["--kube-version", "1.27.0"])


def test_a_change_of_settings_restarts_the_pods_and_only_those(helm4):
    def template(objects, role):
        return find(objects, "StatefulSet", role)["spec"]["template"]

    before = helm4.template()
    after = helm4.template(overrides={"nameserver": {"settings": {"expiry": "31s"}}})
    assert template(before, "nameserver") != template(after, "nameserver")
    assert template(before, "broker") == template(after, "broker")


def test_storage_class_of_a_role_wins_over_the_global_and_a_dash_is_the_empty_one(helm4):
    def class_of(overrides):
        (claim,) = find(helm4.template(overrides=overrides), "StatefulSet", "broker")["spec"][
            "volumeClaimTemplates"
        ]
        return claim["spec"].get("storageClassName")

    assert class_of({}) is None
    assert class_of({"global": {"storageClass": "a"}}) == "a"
    own = {"global": {"storageClass": "a"}, "broker": {"persistence": {"storageClass": "b"}}}
    assert class_of(own) == "b"
    assert class_of({"global": {"storageClass": "-"}}) == ""


@pytest.mark.parametrize(
    ("image", "rendered"),
    [
        ({}, "duemq:0.1.0"),
        ({"tag": "1.2"}, "duemq:1.2"),
        ({"registry": "r.io/x", "tag": "1"}, "r.io/x/duemq:1"),
        ({"tag": "1", "digest": "sha256:" + "0" * 64}, "duemq@sha256:" + "0" * 64),
    ],
)
def test_image_names(helm4, image, rendered):
    objects = helm4.template(overrides={"image": image})
    template = find(objects, "StatefulSet", "broker")["spec"]["template"]
    assert template["spec"]["containers"][0]["image"] == rendered


@pytest.mark.parametrize(
    ("release", "fullname"),
    [
        ("a", "a-duemq"),
        ("duemq", "duemq"),
        ("duemq.a", "duemq-a"),
        ("a.b", "a-b-duemq"),
        ("x" * 32, "x" * 32 + "-duemq"),
    ],
)
def test_names_follow_from_the_release(helm4, release, fullname):
    objects = helm4.template(release=release)
    names = {one["metadata"]["name"] for one in objects if one["kind"] == "StatefulSet"}
    assert names == {f"{fullname}-{role}" for role in ROLES}


def test_only_processes_that_trace_are_told_of_the_collector(helm):
    headers = {"name": "collector", "key": "otlp"}
    otlp = {"endpoint": "https://collector:4317", "headersSecret": headers}

    def variables(overrides, role):
        template = find(helm.template(overrides=overrides), "StatefulSet", role)["spec"]["template"]
        (container,) = template["spec"]["containers"]
        return [one for one in container["env"] if one["name"].startswith("OTEL_")]

    wanted = [
        {"name": "OTEL_EXPORTER_OTLP_ENDPOINT", "value": "https://collector:4317"},
        {"name": "OTEL_EXPORTER_OTLP_HEADERS", "valueFrom": {"secretKeyRef": headers}},
    ]
    assert variables({"tracing": {"otlp": otlp}}, "broker") == wanted
    assert variables({"tracing": {"otlp": otlp}}, "timer-service") == wanted
    assert variables({"tracing": {"otlp": otlp}}, "nameserver") == []
    assert variables({}, "broker") == []


TEXT = st.text(
    st.characters(
        codec="utf-8",
        exclude_categories=("Cc", "Cs", "Cn"),
        exclude_characters="\u2028\u2029\ufeff",
    ),
    max_size=30,
)


@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(text=TEXT)
def test_any_text_survives_quoting(helm4, text):
    objects = helm4.template(
        overrides={
            "commonAnnotations": {"a": text},
            "extraEnv": [{"name": "A", "value": text}],
            "broker": {"podAnnotations": {"b": text}, "priorityClassName": text},
        }
    )
    broker = find(objects, "StatefulSet", "broker")
    template = broker["spec"]["template"]
    assert broker["metadata"]["annotations"]["a"] == text
    assert template["metadata"]["annotations"]["b"] == text
    assert {"name": "A", "value": text} in template["spec"]["containers"][0]["env"]
    assert template["spec"].get("priorityClassName", "") == text


def test_services_have_the_address_families_that_are_wanted(helm):
    def families(values):
        services = [one["spec"] for one in helm.template(values) if one["kind"] == "Service"]
        return [(each.get("ipFamilyPolicy"), each.get("ipFamilies")) for each in services]

    assert families("default") == [(None, None)] * 4
    assert families("full") == [("RequireDualStack", ["IPv6", "IPv4"])] * 4


def test_a_policy_lets_in_who_is_named_and_the_release_itself(helm):
    def sources(objects):
        policies = [one["spec"] for one in objects if one["kind"] == "NetworkPolicy"]
        return [
            {rule["ports"][0]["port"]: rule.get("from") for rule in each["ingress"]}
            for each in policies
        ]

    assert sources(helm.template()) == []
    everyone = {"networkPolicy": {"enabled": True}}
    assert sources(helm.template(overrides=everyone)) == [{"grpc": None, "metrics": None}]
    [named] = sources(helm.template("full"))
    [own, shop, block] = named["grpc"]
    assert own["podSelector"]["matchLabels"] == {
        "app.kubernetes.io/name": "queue",
        "app.kubernetes.io/instance": "test",
    }
    assert [*shop, *block] == ["namespaceSelector", "ipBlock"]
    assert [list(each) for each in named["metrics"]] == [["namespaceSelector"]]


def test_a_report_that_hangs_ends_before_it_is_the_last_one(helm4):
    for wanted, expected in (({}, 21600), ({"activeDeadlineSeconds": 2_000_000}, 2_000_000)):
        objects = helm4.template(overrides={"traces": {"report": {"enabled": True, **wanted}}})
        report = find(objects, "CronJob", "-trace-report")["spec"]
        assert report["concurrencyPolicy"] == "Forbid"
        assert report["jobTemplate"]["spec"]["activeDeadlineSeconds"] == expected


def test_traces_are_off_by_default(helm4):
    assert not [one for one in helm4.template() if "trace" in one["metadata"]["name"]]


def test_one_job_lands_and_one_reports_on_the_same_volume(helm4):
    objects = helm4.template("traces")
    landing = find(objects, "Deployment", "-trace-landing")["spec"]
    report = find(objects, "CronJob", "-trace-report")["spec"]
    assert (landing["replicas"], landing["strategy"]) == (1, {"type": "Recreate"})
    assert report["concurrencyPolicy"] == "Forbid"
    pod = report["jobTemplate"]["spec"]["template"]["spec"]
    (lands,) = landing["template"]["spec"]["containers"]
    (compacts,) = pod["initContainers"]
    (reports,) = pod["containers"]
    folder = "/var/lib/duemq-traces"
    assert lands["image"] == reports["image"] == "registry.example.org:5000/duemq-traces:1.2"
    assert [arguments(each) for each in (lands, compacts, reports)] == [
        {"run": "land", "output": folder, "every": 30.0, "skip_lost": True},
        {"run": "compact", "lake": folder, "keep": timedelta(days=90)},
        {"run": "report", "lake": folder, "since": timedelta(days=7)},
    ]
    near = pod["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert near[0]["labelSelector"]["matchLabels"].items() <= (
        landing["template"]["metadata"]["labels"].items()
    )


def test_without_a_landing_job_the_report_lands_first(helm4):
    given = {"report": {"enabled": True}, "keep": "2d1h"}
    objects = helm4.template(overrides={"traces": given})
    pod = find(objects, "CronJob", "-trace-report")["spec"]["jobTemplate"]["spec"]["template"]
    first, second = pod["spec"]["initContainers"]
    assert first["args"][:2] == ["land", "--once"]
    read = arguments(second)
    assert (read["run"], read["keep"]) == ("compact", timedelta(hours=49))
    assert "affinity" not in pod["spec"]


@pytest.mark.parametrize("skips", [False, True])
def test_whoever_lands_goes_on_where_messages_are_lost_if_it_is_told(helm4, skips):
    report = {"report": {"enabled": True}, "skipLost": skips}
    objects = helm4.template(overrides={"traces": report})
    pod = find(objects, "CronJob", "-trace-report")["spec"]["jobTemplate"]["spec"]["template"]
    lands, compacts = pod["spec"]["initContainers"]
    assert arguments(lands)["skip_lost"] is skips
    assert "--skip-lost" not in [*compacts["args"], *pod["spec"]["containers"][0]["args"]]


def arguments(container):
    """What the command in a container reads."""
    read = vars(command._parser().parse_args(container["args"]))
    assert container["command"] == ["python", "-m", "duemq_analytics"]
    wanted = {name: read[name] for name in ("every", "keep", "since", "lake") if read.get(name)}
    if read["command"] == "land":
        wanted |= {name: read[name] for name in ("output", "skip_lost")}
    return {"run": read["command"], **wanted}


def test_permissions_are_a_file_that_changes_without_a_restart(helm):
    def templates(objects):
        return [one["spec"]["template"] for role in ROLES for one in sets_of(objects, role)]

    def text_of(objects):
        return find(objects, "ConfigMap", "-permissions")["data"]["permissions.toml"]

    def allowed(objects):
        return parse(text_of(objects)).allows(("shop.example.org",), Need(Action.SEND, "orders-1"))

    before = helm.template("tls")
    assert allowed(before)
    text = text_of(before).replace("orders", "returns")
    after = helm.template("tls", {"tls": {"permissions": text}})
    assert not allowed(after)
    assert templates(before) == templates(after)
    for template in templates(before):
        spec = template["spec"]
        [volume] = [each for each in spec["volumes"] if each["name"] == "permissions"]
        assert volume["configMap"] == {"name": "test-duemq-permissions"}
        [container] = spec["containers"]
        [mount] = [each for each in container["volumeMounts"] if each["name"] == "permissions"]
        assert f"--permissions={mount['mountPath']}/permissions.toml" in container["args"]


def test_an_upgrade_leaves_pods_of_before_their_settings(helm):
    """One that starts anew meanwhile has its old image, which may refuse what is new."""

    def others(objects):
        return [one for one in objects if one["kind"] not in {"StatefulSet", "Pod"}]

    given = {values: {"settings": {"log_level": "DEBUG"}} for _, values in ROLES.values()}
    before, after = helm.template(), helm.template(overrides=given)
    assert others(before) == others(after)
    for role in ROLES:
        assert config_of(before, role) | {"log_level": "DEBUG"} == config_of(after, role)


def test_settings_keep_their_annotation(helm4):
    """Of two of one name the last one would count."""
    taken = {"duemq/settings": "x", "a": "b"}
    given = {"commonAnnotations": taken, "broker": {"podAnnotations": taken}}
    objects = helm4.template(overrides=given)
    assert config_of(objects, "broker") == config_of(helm4.template(), "broker")
    [one] = sets_of(objects, "broker")
    assert one["spec"]["template"]["metadata"]["annotations"]["a"] == "b"


def test_permissions_without_clients_certificates_are_refused(helm):
    with pytest.raises(RefusedValuesError, match="permissions needs"):
        helm.template("tls", {"tls": {"verifyClients": False}})
