"""Alerts and the dashboard ask for what processes show, and for nothing else."""

import json
import re
import shutil
import subprocess
import urllib.request
from collections import defaultdict
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

import duemq
from duemq_server.local_cluster import EmbeddedCluster
from tests.chart import promql
from tests.chart.conftest import CHART, RefusedValuesError
from tests.cluster.harness import WAIT_S, until

ALERTS = {"metrics": {"prometheusRule": {"enabled": True}}}
# Of the pods that `up`'s members would be.
PODS = {
    "nameserver-0": "test-duemq-nameserver-0",
    "broker-0/a": "test-duemq-broker-0-0",
    "broker-0/b": "test-duemq-broker-0-1",
    "timer-0/a": "test-duemq-timer-service-0-0",
    "timer-0/b": "test-duemq-timer-service-0-1",
}


def series_of(address):
    """Labels of every series on a page, by name."""
    found = defaultdict(list)
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=WAIT_S) as answer:
        for family in text_string_to_metric_families(answer.read().decode()):
            for sample in family.samples:
                found[sample.name].append(sample.labels)
    return dict(found)


def refuse(message):
    raise duemq.DeadLetter(message.body.decode())


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Series by pod, of a cluster with replicas in which something has happened."""
    folder = tmp_path_factory.mktemp("cluster")
    with EmbeddedCluster(folder, brokers=1, replicas=2, metrics=True) as cluster:
        with duemq.Producer(cluster.nameserver) as producer:
            producer.send("orders", b"bad")
            producer.send("orders", b"late", delay="10ms")
        shown = {}

        def has_happened():
            shown.update({PODS[name]: series_of(at) for name, at in cluster.metrics.items()})
            names = {name for page in shown.values() for name in page}
            return {
                "duemq_broker_dead_letters_kept",
                "duemq_timer_topic_lateness_ms_bucket",
            } <= names

        with duemq.PushConsumer(
            "shop", "orders", refuse, start_from="earliest", nameserver=cluster.nameserver
        ):
            until(has_happened)
        assert set(shown) == set(PODS.values())
        yield shown


def rule_of(objects):
    [rule] = [one for one in objects if one["kind"] == "PrometheusRule"]
    [group] = rule["spec"]["groups"]
    return rule, group["rules"]


def test_alerts_ask_for_what_processes_show(helm, pages):
    _, alerts = rule_of(helm.template("default", ALERTS))
    assert len(alerts) > 10
    for alert in alerts:
        expression = promql.check(alert["expr"], pages)
        told = set(re.findall(r"\$labels\.(\w+)", json.dumps(alert["annotations"])))
        assert told <= promql.result_labels(expression), alert["alert"]
        assert "namespace" in promql.result_labels(expression)


def test_a_metric_that_nobody_shows_is_found(pages):
    """Else the check above could not fail."""
    place = 'namespace="messages", pod=~"test-duemq-broker-[0-9-]+"'
    promql.check(f"sum by (pod) (duemq_broker_read_only{{{place}}})", pages)
    for wrong in (
        f"sum by (pod) (duemq_broker_readonly{{{place}}})",
        f"sum by (topic) (duemq_broker_read_only{{{place}}})",
        f'sum by (pod) (duemq_replica_role{{{place}, role="boss"}})',
        f"sum by (pod) (duemq_nameserver_lost{{{place}}})",
    ):
        with pytest.raises(AssertionError):
            promql.check(wrong, pages)


def test_the_readme_says_of_every_alert_what_to_do(helm4):
    _, alerts = rule_of(helm4.template("default", ALERTS))
    text = (CHART / "README.md").read_text().partition("\n## Alerts\n")[2].partition("\n## ")[0]
    explained = re.findall(r"^\| `(\w+)` \| .{20,} \| .{20,} \|$", text, re.MULTILINE)
    assert explained == [alert["alert"] for alert in alerts]
    for alert in alerts:
        assert alert["annotations"]["runbook"].endswith(f'"Alerts": {alert["alert"]}')
        assert alert["labels"]["severity"] in {"critical", "warning", "info"}


def test_alerts_are_of_this_release_and_of_its_numbers(helm):
    given = {
        "fullnameOverride": "queue",
        "broker": {"replicas": 5},
        "timerService": {"replicas": 3, "settings": {"clock_difference_max": "1.5s"}},
        "metrics": {
            "prometheusRule": {
                "enabled": True,
                "labels": {"release": "prometheus"},
                "alertLabels": {"team": "messaging", "severity": "page"},
                "disabled": ["DuemqSpansDropped"],
                "runbookUrl": "https://wiki.example.org/duemq",
                "latenessMs": 50,
                "consumerLagSeconds": 60,
            }
        },
    }
    rule, alerts = rule_of(helm.template(overrides=given))
    assert rule["metadata"]["labels"]["release"] == "prometheus"
    known = {alert["alert"]: alert for alert in alerts}
    assert "DuemqSpansDropped" not in known
    assert known["DuemqBrokerAway"]["expr"].endswith("< 5")
    assert known["DuemqTimerShardAway"]["expr"].endswith("< 3")
    assert known["DuemqTimersLate"]["expr"].endswith("> 50")
    assert known["DuemqClocksApart"]["expr"].endswith("> 1.5")
    assert "> 60 and" in known["DuemqConsumerLagGrows"]["expr"]
    for alert in alerts:
        assert 'pod=~"queue-' in alert["expr"]
        assert not re.search(r"<[a-z ]+>", alert["expr"])
        assert alert["labels"] == {"team": "messaging", "severity": "page"}
        assert alert["annotations"]["runbook_url"] == "https://wiki.example.org/duemq"


def test_nothing_is_watched_by_default(helm4):
    kinds = {one["kind"] for one in helm4.template()}
    assert not kinds & {"PrometheusRule", "ServiceMonitor"}
    assert not [one for one in helm4.template() if one["metadata"]["name"].endswith("-dashboard")]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"enabled": False, "prometheusRule": {"enabled": True}}, "needs metrics.enabled"),
        ({"enabled": False, "dashboard": {"enabled": True}}, "needs metrics.enabled"),
        ({"prometheusRule": {"disabled": ["DuemqNothing"]}}, "disabled"),
        ({"prometheusRule": {"latenessMs": 0}}, "latenessMs"),
    ],
)
def test_wrong_values_are_refused_by_name(helm, values, said):
    with pytest.raises(RefusedValuesError, match=said):
        helm.template(overrides={"metrics": values})


def dashboard_of(objects):
    [one] = [each for each in objects if each["metadata"]["name"].endswith("-dashboard")]
    [(name, text)] = one["data"].items()
    assert name.endswith(".json")
    return one["metadata"], json.loads(text)


def test_panels_ask_for_what_processes_show(helm, pages):
    metadata, dashboard = dashboard_of(
        helm.template(overrides={"metrics": {"dashboard": {"enabled": True}}})
    )
    assert metadata["labels"]["grafana_dashboard"] == "1"
    panels = [each for each in dashboard["panels"] if each["type"] != "row"]
    assert len(panels) > 20
    for panel in panels:
        assert panel["targets"]
        for target in panel["targets"]:
            # Grafana's own, which depends on the zoom.
            expression = promql.check(target["expr"].replace("$__rate_interval", "5m"), pages)
            told = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            assert told <= promql.result_labels(expression), target["expr"]


def test_panels_have_places_and_names_of_their_own(helm4):
    given = {"metrics": {"dashboard": {"enabled": True}}}
    _, dashboard = dashboard_of(helm4.template(overrides=given))
    taken = set()
    for panel in dashboard["panels"]:
        at = panel["gridPos"]
        squares = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert max(x for x, _ in squares) < 24
        assert not squares & taken
        taken |= squares
    for key in ("id", "title"):
        assert len({each[key] for each in dashboard["panels"]}) == len(dashboard["panels"])
    [choice] = dashboard["templating"]["list"]
    used = {t["datasource"]["uid"] for p in dashboard["panels"] for t in p.get("targets", ())}
    assert used == {f"${{{choice['name']}}}"}


def test_two_releases_have_two_dashboards(helm4):
    """Grafana tells them by their uid, of 40 characters at most."""
    given = {"metrics": {"dashboard": {"enabled": True}}, "fullnameOverride": "q" * 38}
    found = [
        dashboard_of(helm4.template(overrides=given, arguments=["--namespace", namespace]))[1][
            "uid"
        ]
        for namespace in ("a", "b", "a")
    ]
    assert found[0] == found[2] != found[1]
    assert len(found[0]) <= 40


def test_only_alerts_that_exist_can_be_left_out():
    schema = json.loads((CHART / "values.schema.json").read_text())
    rule = schema["properties"]["metrics"]["properties"]["prometheusRule"]["properties"]
    alerts = yaml.safe_load((CHART / "files" / "alerts.yaml").read_text())
    assert rule["disabled"]["items"]["enum"] == [each["alert"] for each in alerts]


@pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool (Debian: prometheus)")
def test_alerts_fire_when_they_should_and_only_then(helm4, tmp_path):
    rule, _ = rule_of(helm4.template("default", ALERTS))
    (tmp_path / "rules.yaml").write_text(yaml.safe_dump(rule["spec"]))
    shutil.copy(Path(__file__).with_name("alerts.yaml"), tmp_path)
    done = subprocess.run(
        ["promtool", "test", "rules", tmp_path / "alerts.yaml"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
