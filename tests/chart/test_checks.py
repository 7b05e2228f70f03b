"""What values the chart refuses, or warns of, as the processes would not do well with them."""

import json
import re

import kubernetes_validate
import pytest
import yaml

from duemq_server.replication.stores.kubernetes import LABELS
from tests.chart.conftest import CHART
from tests.chart.test_objects import containers
from tests.chart.test_values import (
    ROLES,
    free_settings,
    notes,
    sets_of,
    settings_class,
    settings_of,
)


@pytest.mark.parametrize("role", ROLES)
def test_what_a_process_would_refuse_the_chart_refuses(role):
    """Else one of each role is away after an upgrade, until somebody looks."""
    schema = json.loads((CHART / "values.schema.json").read_text())
    numbers = schema["properties"][ROLES[role][1]]["properties"]["settings"]["properties"]
    limits = yaml.safe_load((CHART / "files" / "limits.yaml").read_text())[role]
    fields = settings_class(role).__dataclass_fields__
    free = {name: fields[name].metadata for name in free_settings(role)}
    assert limits == {
        name: [known["min"], known["max"]] for name, known in free.items() if known["unit"]
    }
    for name, known in free.items():
        if not known["unit"] and known["min"] is not None:
            bounds = numbers[name]["minimum"], numbers[name].get("maximum")
            assert bounds == (known["min"], known["max"])


@pytest.mark.parametrize(
    ("role", "settings"),
    [
        ("broker", {"retention_bytes": 20 << 40, "message_bytes_max": "8MiB", "lag_max": "100ms"}),
        ("broker", {"producer_memory": "366d", "session_timeout": 300, "segment_bytes": 65536}),
        ("broker", {"delay_levels": " 500ms  1s ", "retry_delays": "0s"}),
        ("broker", {"delay_levels": "1s " * 256, "retry_delays": "1s " * 255 + "366d"}),
        ("broker", {"delay_levels": "400d", "retry_delays": " 8784h 31622400s "}),
        ("broker", {"retention_bytes": "18.8GiB", "segment_bytes": "0.3GiB"}),
        ("timerService", {"near_window": "1.05m", "checkpoint_bytes": "4GiB"}),
        ("nameserver", {"ready_after": 0, "lost_kept": "720h", "unsent_bytes_max": "1TiB"}),
    ],
)
def test_what_a_process_takes_the_chart_takes(helm, role, settings, tmp_path):
    objects = helm.template(overrides={role: {"settings": settings}})
    name = {"timerService": "timer-service"}.get(role, role)
    settings_of(sets_of(objects, name)[0], name, 0, tmp_path)


@pytest.mark.parametrize(
    ("grace", "drain", "replicas", "early"),
    [(60, "10s", 1, False), (30, "30s", 1, True), (30, "29s", 1, False), (30, 25, 3, True)],
)
def test_whoever_installs_is_told_of_pods_that_are_killed_before_they_stop(
    helm4, grace, drain, replicas, early
):
    given = {"terminationGracePeriodSeconds": grace, "settings": {"drain_timeout": drain}}
    told = notes(
        helm4,
        {
            "broker": {"replicasPerBroker": replicas, **given},
            "timerService": {"replicasPerShard": replicas, **given},
        },
    )
    for role in ("broker", "timerService"):
        assert (f"WARNING: {role}.terminationGracePeriodSeconds is {grace}" in told) == early
    assert "WARNING: nameserver.terminationGracePeriodSeconds" not in told


@pytest.mark.parametrize(
    ("kept", "size", "late"),
    [
        (0, "20Gi", False),
        ("18.6GiB", "20Gi", False),
        ("18.7GiB", "20Gi", True),
        ("20GiB", "20Gi", True),
        ("2TiB", "2T", True),
    ],
)
def test_whoever_installs_is_told_of_a_disk_that_fills_before_messages_go(helm4, kept, size, late):
    """Beside what is kept lie a segment, a quarter of it for its queues, and what stays free."""
    given = {"settings": {"retention_bytes": kept}, "persistence": {"size": size}}
    told = notes(helm4, {"broker": given})
    assert ("WARNING: broker.settings.retention_bytes" in told) == late


@pytest.mark.parametrize(
    ("limit", "unsent", "much"),
    [("768Mi", "256MiB", False), ("512Mi", "256MiB", True), ("1G", 500_000_000, True)],
)
def test_whoever_installs_is_told_of_memory_that_slow_clients_can_take(helm4, limit, unsent, much):
    given = {"resources": {"limits": {"memory": limit}}, "settings": {"unsent_bytes_max": unsent}}
    told = notes(helm4, {"nameserver": given})
    assert ("WARNING: nameserver.resources.limits.memory" in told) == much


@pytest.mark.parametrize(
    ("limit", "near", "much"),
    [("1Gi", "64MiB", False), ("1Gi", "480MiB", True), ("600Mi", "64MiB", True), (None, "1GiB", 0)],
)
def test_whoever_installs_is_told_of_memory_that_timers_can_take(helm4, limit, near, much):
    given = {"resources": {"limits": {"memory": limit}}, "settings": {"near_bytes_max": near}}
    told = notes(helm4, {"timerService": given})
    assert ("WARNING: timerService.resources.limits.memory" in told) == bool(much)


def test_no_warning_is_of_the_values_as_they_are(helm4):
    assert "WARNING" not in notes(helm4, {})


def test_no_warning_is_of_what_is_null(helm4):
    """It is the process's own then, and Kubernetes' for pods."""
    given = {
        values: {
            "terminationGracePeriodSeconds": None,
            "settings": dict.fromkeys(free_settings(role)),
        }
        for role, (_, values) in ROLES.items()
    }
    assert "WARNING" not in notes(helm4, given)
    late = {"terminationGracePeriodSeconds": None, "settings": {"drain_timeout": "30s"}}
    assert "WARNING: broker.terminationGracePeriodSeconds is 30" in notes(helm4, {"broker": late})


@pytest.mark.parametrize("name", ["part-of", "version", "component", "managed-by"])
def test_a_common_label_of_the_charts_own_is_there_once(helm, name):
    """Of two the last one would count: a ServiceMonitor found no Service, kustomize none at all."""
    key = f"app.kubernetes.io/{name}"
    rendered = helm.run(
        "template", "test", CHART, "--values", "-", input=yaml.dump({"commonLabels": {key: "shop"}})
    ).stdout
    for one in rendered.split("\n---\n"):
        labels = re.search(r"^  labels:\n((?:    .*\n)+)", one, re.MULTILINE)
        found = re.findall(rf"^    {key}: (.*)$", labels[1], re.MULTILINE)
        assert len(found) == 1
        assert (found == ["shop"]) == (name in {"part-of", "version"})


@pytest.mark.parametrize("name", ["a.example.org-tls", "x" * 253])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_secrets_and_accounts_have_names_as_kubernetes_allows(helm4, name):
    """With dots, as cert-manager's users call them; only labels and Services have none."""
    given = {
        "global": {"imagePullSecrets": [name]},
        "serviceAccount": {"name": name},
        "tls": {"secretName": name},
        "leaseStoreSecret": name,
        "leaseStore": "etcd:https://e:1",
        "broker": {"replicasPerBroker": 3},
        "tracing": {"otlp": {"headersSecret": {"name": name}}},
    }
    [broker, *_] = sets_of(helm4.template(overrides=given), "broker")
    spec = broker["spec"]["template"]["spec"]
    kubernetes_validate.validate(broker, "1.35", strict=True)
    assert spec["imagePullSecrets"] == [{"name": name}]
    assert spec["serviceAccountName"] == name
    secrets = [volume["secret"]["secretName"] for volume in spec["volumes"] if "secret" in volume]
    assert secrets == [name, name]


def test_variables_are_for_every_container(helm):
    given = {
        "extraEnv": [{"name": "A", "value": "b"}],
        "extraEnvFrom": [{"secretRef": {"name": "s"}}],
    }
    objects = helm.template("traces", given)
    for container in containers(objects):
        assert given["extraEnv"][0] in container["env"]
        assert container["envFrom"] == given["extraEnvFrom"]


def test_leases_are_deleted_by_name():
    """Nothing of their labels is of one release: another one's groups would lose their records."""
    assert not any("instance" in label for label in LABELS)
    text = (CHART / "README.md").read_text()
    assert "kubectl delete lease " in text
    assert not re.search(r"delete leases? (-l|--selector|--all)", text)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_names_of_digits_are_texts(helm):
    """`2024` is a number for YAML, and no label or name for Kubernetes."""
    objects = helm.template(
        overrides={
            "nameOverride": "123",
            "serviceAccount": {"name": "456"},
            "tls": {"secretName": "789"},
            "broker": {"replicasPerBroker": 3, "settings": {"tracing": "otlp"}},
            "leaseStore": "etcd:https://e:1",
            "leaseStoreSecret": "12",
            "tracing": {"otlp": {"headersSecret": {"name": "34", "key": "56"}}},
            "traces": {"report": {"enabled": True}},
        },
        release="2024",
        # Which takes them for Services, too.
        arguments=["--namespace", "2025", "--kube-version", "1.37.0"],
    )
    for one in objects:
        kubernetes_validate.validate(one, "1.35", strict=True)
        assert one["metadata"]["namespace"] == "2025"
