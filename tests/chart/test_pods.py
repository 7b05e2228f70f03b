"""What a pod may have beside what the chart gives it."""

import kubernetes_validate
import pytest

from tests.chart.conftest import RefusedValuesError
from tests.chart.test_objects import pods
from tests.chart.test_values import ROLES, find, sets_of

PLACE = {
    "priorityClassName": "high",
    "runtimeClassName": "gvisor",
    "hostAliases": [{"ip": "10.0.0.1", "hostnames": ["collector.example.org"]}],
    "dnsPolicy": "None",
    "dnsConfig": {
        "nameservers": ["10.96.0.10", "fd00::a"],
        "searches": ["svc.example.internal"],
        "options": [{"name": "ndots", "value": "2"}],
    },
    "nodeSelector": {"disk": "nvme"},
    "tolerations": [{"key": "dedicated", "operator": "Exists"}],
}
SIDECAR = {
    "name": "ship-logs",
    "image": "vector:1",
    "volumeMounts": [{"name": "data", "mountPath": "/d"}],
}
FIRST = {"name": "wait", "image": "busybox:1", "command": ["true"]}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_every_pod_is_where_and_finds_names_as_its_values_say(helm):
    traces = {"report": {"enabled": True}, "landing": {"enabled": True}}
    objects = helm.template(
        overrides={**{values: PLACE for _, values in ROLES.values()}, "traces": {**traces, **PLACE}}
    )
    looked = [spec for name, _, spec in pods(objects) if not name.endswith("-test")]
    assert len(looked) == len(ROLES) + 2
    for spec in looked:
        assert {key: spec[key] for key in PLACE} == PLACE
    for one in objects:
        kubernetes_validate.validate(one, "1.35", strict=True)


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_sidecars_stand_behind_the_process_and_others_before_it(helm, grouped):
    given = {"extraContainers": [SIDECAR], "extraInitContainers": [FIRST]}
    size = {"replicasPerBroker": 3} if grouped else {}
    objects = helm.template(overrides={"broker": {**given, **size}})
    for one in sets_of(objects, "broker"):
        spec = one["spec"]["template"]["spec"]
        # Where nobody names one, tools take the first: `kubectl logs`, the chart itself.
        assert [each["name"] for each in spec["containers"]] == ["broker", "ship-logs"]
        assert spec["containers"][1] == SIDECAR
        assert spec["initContainers"] == [FIRST]
        kubernetes_validate.validate(one, "1.35", strict=True)
    assert len(sets_of(objects, "timer-service")[0]["spec"]["template"]["spec"]["containers"]) == 1


def test_pods_of_traces_have_labels_that_change_no_selector(helm):
    own = {"app.kubernetes.io/component": "mine", "sidecar": "no"}
    given = {"podLabels": own, "podAnnotations": {"a": "b"}, "landing": {"enabled": True}}
    landing = find(helm.template(overrides={"traces": given}), "Deployment", "-trace-landing")[
        "spec"
    ]
    metadata = landing["template"]["metadata"]
    assert landing["selector"]["matchLabels"].items() <= metadata["labels"].items()
    assert metadata["labels"]["sidecar"] == "no"
    assert metadata["annotations"] == {"a": "b"}


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"broker": {"dnsPolicy": "None"}}, "broker: dnsPolicy None needs dnsConfig.nameservers"),
        (
            {"nameserver": {"dnsPolicy": "None", "dnsConfig": {"searches": ["a"]}}},
            "nameserver: dnsPolicy None needs dnsConfig.nameservers",
        ),
        ({"broker": {"dnsPolicy": "none"}}, "dnsPolicy"),
        ({"broker": {"dnsConfig": {"nameserver": "10.0.0.1"}}}, "nameserver"),
        ({"broker": {"hostAliases": [{"ip": "10.0.0.1"}]}}, "hostnames"),
        ({"timerService": {"extraContainers": [{"name": "a"}]}}, "image"),
        ({"timerService": {"extraInitContainers": {"name": "a"}}}, "extraInitContainers"),
        ({"timerService": {"runtimeClassName": "a/b"}}, "runtimeClassName"),
    ],
)
def test_what_kubernetes_takes_no_pod_with_is_refused_by_name(helm, values, said):
    with pytest.raises(RefusedValuesError, match=said):
        helm.template(overrides=values)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_report_is_made_by_the_clock_of_its_zone(helm):
    given = {"enabled": True, "schedule": "0 6 * * *", "timeZone": "Europe/Berlin"}
    report = find(helm.template(overrides={"traces": {"report": given}}), "CronJob", "-report")
    assert report["spec"]["timeZone"] == "Europe/Berlin"
    kubernetes_validate.validate(report, "1.35", strict=True)
    given.pop("timeZone")
    report = find(helm.template(overrides={"traces": {"report": given}}), "CronJob", "-report")
    assert "timeZone" not in report["spec"]


def test_values_of_the_chart_before_are_enough(helm):
    """`helm upgrade --reuse-values` takes its defaults, too: what is new is not there."""
    new = ["runtimeClassName", "hostAliases", "dnsPolicy", "dnsConfig"]
    more = ["podLabels", "podAnnotations", "priorityClassName"]
    missing = {
        **{
            values: dict.fromkeys([*new, "extraContainers", "extraInitContainers"])
            for _, values in ROLES.values()
        },
        "traces": dict.fromkeys([*new, *more]),
        "metrics": {"prometheusRule": None, "dashboard": None},
        "external": None,
    }
    on = {"report": {"enabled": True, "timeZone": None}, "landing": {"enabled": True}}
    before = {**missing, "traces": {**missing["traces"], **on}}
    assert helm.template(overrides=before) == helm.template(overrides={"traces": on})
