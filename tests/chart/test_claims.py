"""What the chart asks the API server: an upgrade that would leave data behind is refused."""

import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import yaml

from tests.chart.conftest import CHART, Loader

CLAIMS = "/api/v1/namespaces/messages/persistentvolumeclaims/"
PERMISSIONS = "/api/v1/namespaces/messages/configmaps/test-duemq-permissions"
SETS = "/apis/apps/v1/namespaces/messages/statefulsets/test-duemq-"
KINDS = {
    "v1": ["PersistentVolumeClaim", "ConfigMap", "Pod", "Service", "ServiceAccount"],
    "apps/v1": ["StatefulSet"],
    "batch/v1": ["CronJob"],
    "policy/v1": ["PodDisruptionBudget"],
    "rbac.authorization.k8s.io/v1": ["Role", "RoleBinding"],
}


def discovery():
    """What an API server says of itself: where it has which kinds."""
    groups = [version for version in KINDS if "/" in version]
    said = {
        "/version": {"major": "1", "minor": "34", "gitVersion": "v1.34.0"},
        "/api": {"kind": "APIVersions", "versions": ["v1"]},
        "/apis": {"kind": "APIGroupList", "groups": [group(each) for each in groups]},
    }
    for version, kinds in KINDS.items():
        resources = [
            {"name": f"{kind.lower()}s", "namespaced": True, "kind": kind, "verbs": ["get"]}
            for kind in kinds
        ]
        path = f"/apis/{version}" if version in groups else f"/api/{version}"
        said[path] = {
            "kind": "APIResourceList",
            "groupVersion": version,
            "resources": resources,
        }
    return said


def group(version):
    versions = [{"groupVersion": version, "version": version.partition("/")[2]}]
    return {
        "name": version.partition("/")[0],
        "versions": versions,
        "preferredVersion": versions[0],
    }


DISCOVERY = discovery()


def own(name):
    """Metadata by which Helm knows its own objects."""
    release = {"release-name": "test", "release-namespace": "messages"}
    return {
        "name": name,
        "namespace": "messages",
        "labels": {"app.kubernetes.io/managed-by": "Helm"},
        "annotations": {f"meta.helm.sh/{key}": value for key, value in release.items()},
    }


def objects_of(claims, permissions, sets, lake):
    """What is there, by path."""
    found = {CLAIMS + name: {"kind": "PersistentVolumeClaim"} for name in claims}
    if lake:
        found[CLAIMS + "test-duemq-trace-lake"] = {"kind": "PersistentVolumeClaim", "spec": lake}
    if permissions:
        found[PERMISSIONS] = {"kind": "ConfigMap", "data": {"permissions.toml": permissions}}
    for name, spec in sets.items():
        found[SETS + name] = {"apiVersion": "apps/v1", "kind": "StatefulSet", "spec": spec}
    return {
        path: {"apiVersion": "v1", "metadata": own(path.rpartition("/")[2])} | each
        for path, each in found.items()
    }


@contextmanager
def api_server(tmp_path, *claims, permissions="", lake=None, **sets):
    """As much of one as a rendering asks for; answers a kubeconfig.  `sets`: specs by roles."""
    known = DISCOVERY | objects_of(claims, permissions, sets, lake)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            found = known.get(self.path.partition("?")[0])
            missing = {"kind": "Status", "status": "Failure", "reason": "NotFound", "code": 404}
            body = json.dumps(found or missing).encode()
            self.send_response(200 if found else 404)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        address = f"http://127.0.0.1:{server.server_port}"
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "c",
            "clusters": [{"name": "c", "cluster": {"server": address}}],
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
            "users": [{"name": "u", "user": {}}],
        }
        path = tmp_path / "kubeconfig"
        path.write_text(yaml.dump(config))
        try:
            yield path
        finally:
            server.shutdown()
            thread.join()


def rendered(helm, kubeconfig, *values):
    sets = [part for each in values for part in ("--set", each)]
    command = [
        "template",
        "test",
        CHART,
        "--namespace",
        "messages",
        "--dry-run=server",
        "--disable-openapi-validation",
    ]
    return helm.run(*command, *sets, "--kubeconfig", kubeconfig)


def check(done, refused):
    """It is refused in these words; "": it is not."""
    assert (done.returncode != 0) == bool(refused), done.stderr
    assert refused in done.stderr


REPLICAS = "broker.replicasPerBroker=3"


@pytest.mark.parametrize(
    ("claims", "values", "refused"),
    [
        ((), [], ""),
        ((), [REPLICAS], ""),
        (["data-test-duemq-broker-0"], [], ""),
        (["data-test-duemq-broker-0"], [REPLICAS], "data-test-duemq-broker-0"),
        (["data-test-duemq-broker-1"], [REPLICAS], "data-test-duemq-broker-1"),
        (["data-test-duemq-broker-0", "data-test-duemq-broker-0-0"], [REPLICAS], ""),
        (["data-test-duemq-broker-0-0"], [REPLICAS], ""),
        (["data-test-duemq-broker-0-0"], [], "data-test-duemq-broker-0-0"),
        (
            ["data-test-duemq-timer-service-0"],
            ["timerService.replicasPerShard=2"],
            "data-test-duemq-timer-service-0",
        ),
        (["data-test-duemq-broker-0"], [REPLICAS, "broker.persistence.enabled=false"], ""),
    ],
)
def test_data_under_the_names_of_the_other_layout_are_not_left_behind(
    helm, tmp_path, claims, values, refused
):
    with api_server(tmp_path, *claims) as kubeconfig:
        done = rendered(helm, kubeconfig, *values)
    check(done, refused and f"the claim {refused} has data that nobody would read")


def permissions_of(helm, kubeconfig, *values):
    done = rendered(helm, kubeconfig, *values)
    check(done, "")
    objects = [one for one in yaml.load_all(done.stdout, Loader) if one]
    return [
        one["data"]["permissions.toml"].strip()
        for one in objects
        if one["metadata"]["name"] == "test-duemq-permissions"
    ]


def test_pods_of_before_keep_the_permissions_that_others_no_longer_have(helm, tmp_path):
    """One that starts anew before it is exchanged would end for want of the file."""
    tls = "tls.secretName=duemq-tls,tls.verifyClients=true"
    with api_server(tmp_path, permissions="[[allow]]\n") as kubeconfig:
        assert permissions_of(helm, kubeconfig, tls) == ["[[allow]]"]
        assert permissions_of(helm, kubeconfig, f"{tls},tls.permissions=new") == ["new"]
    with api_server(tmp_path) as kubeconfig:
        assert permissions_of(helm, kubeconfig, tls) == []


MADE = {
    "metadata": {"name": "data", "creationTimestamp": None},
    "spec": {
        "accessModes": ["ReadWriteOnce"],
        "resources": {"requests": {"storage": "20Gi"}},
        "volumeMode": "Filesystem",
    },
}


def sized(size):
    spec = {**MADE["spec"], "resources": {"requests": {"storage": size}}}
    return [{**MADE, "spec": spec}]


NAMED = {**MADE, "metadata": {"name": "data", "annotations": {"a": "b"}}}
FAST = {**MADE, "spec": {**MADE["spec"], "storageClassName": "fast"}}


@pytest.mark.parametrize(
    ("templates", "values", "said"),
    [
        ([MADE], ["broker.persistence.storageClass=-"], ""),
        ([MADE], ["broker.persistence.storageClass=null,global.storageClass=null"], ""),
        ([MADE], ["broker.persistence.size=20480Mi"], ""),
        ([MADE], ["broker.persistence.size=40Gi"], "size is 40Gi, of the StatefulSet {} 20Gi"),
        (sized("2254857830400m"), ["broker.persistence.size=2.1Gi"], ""),
        (sized("1Pi"), ["broker.persistence.size=1024Ti"], ""),
        (sized("1536Gi"), ["broker.persistence.size=1.5Ti"], ""),
        ([MADE], ["broker.persistence.annotations=null"], ""),
        ([NAMED], ["broker.persistence.annotations.a=b"], ""),
        ([NAMED], [], 'annotations is {{}}, of the StatefulSet {} {{"a":"b"}}'),
        ([FAST], ["global.storageClass=fast"], ""),
        ([FAST], [], "storageClass is , of the StatefulSet {} fast"),
        ([MADE], ["global.storageClass=fast"], "storageClass is fast, of the StatefulSet {} ,"),
        ([MADE], ["broker.persistence.enabled=false"], "enabled is false, of the StatefulSet {} t"),
        ([], [], "enabled is true, of the StatefulSet {} false"),
        ([], ["broker.persistence.enabled=false"], ""),
        (
            [MADE],
            ["broker.persistence.accessModes={ReadWriteOncePod}"],
            "accessModes is ReadWriteOncePod, of the StatefulSet {} ReadWriteOnce,",
        ),
    ],
)
def test_what_a_set_cannot_take_is_refused_by_its_name(helm, tmp_path, templates, values, said):
    """Kubernetes would refuse it, too, but names no value, and after other objects were changed."""
    with api_server(tmp_path, broker={"volumeClaimTemplates": templates}) as kubeconfig:
        done = rendered(helm, kubeconfig, *values)
    check(done, said and f"broker: persistence.{said.format('test-duemq-broker')}")


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize(
    ("shards", "values", "refused"),
    [
        (2, ["timerService.replicas=1"], True),
        (2, ["timerService.replicas=2,timerService.shards=1"], False),
        (1, ["timerService.replicas=1"], False),
        (2, ["timerService.replicas=3"], False),
    ],
)
def test_a_shard_goes_only_when_it_was_told_to_leave(
    helm, tmp_path, replicas, shards, values, refused
):
    """What it holds would wait on its volume, and nobody say so."""
    container = {"args": ["--shard=$(POD_INDEX)", f"--shards={shards}"]}
    spec = {
        "volumeClaimTemplates": [MADE],
        "template": {"spec": {"containers": [container]}},
    }
    name = "timer-service" if replicas == 1 else "timer-service-0"
    values = [*values, f"timerService.replicasPerShard={replicas}"]
    with api_server(tmp_path, **{name: spec}) as kubeconfig:
        done = rendered(helm, kubeconfig, *values)
    check(done, "upgrade with timerService.shards=1 first" if refused else "")


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([], ""),
        (["traces.persistence.size=40Gi"], ""),
        (["traces.persistence.size=20480Mi"], ""),
        (["traces.persistence.storageClass=standard"], ""),
        (["traces.persistence.size=10Gi"], "size is 10Gi, of the claim {} 20Gi, which cannot sh"),
        (["traces.persistence.storageClass=fast"], "storageClass is fast, of the claim {} standa"),
        (["global.storageClass=fast,broker.persistence.enabled=false"], "storageClass is fast, of"),
        (["traces.persistence.storageClass=-"], "storageClass is , of the claim {} standard"),
        (
            ["traces.persistence.accessModes={ReadWriteMany}"],
            "accessModes is ReadWriteMany, of the claim {} ReadWriteOnce,",
        ),
    ],
)
def test_what_the_claim_of_traces_cannot_take_is_refused_by_its_name(helm, tmp_path, values, said):
    """The class of a claim that named none is the cluster's own by now."""
    lake = {
        "accessModes": ["ReadWriteOnce"],
        "storageClassName": "standard",
        "resources": {"requests": {"storage": "20Gi"}},
    }
    with api_server(tmp_path, lake=lake) as kubeconfig:
        done = rendered(helm, kubeconfig, "traces.report.enabled=true", *values)
    check(done, said and f"traces: persistence.{said.format('test-duemq-trace-lake')}")


def test_a_claim_of_traces_may_have_any_size(helm, tmp_path):
    """2.1Gi is no whole number of bytes: Kubernetes keeps thousandths."""
    sized = {"resources": {"requests": {"storage": "2254857830400m"}}}
    lake = {"accessModes": ["ReadWriteOnce"], **sized}
    values = "traces.report.enabled=true,traces.persistence.size=2.1Gi"
    with api_server(tmp_path, lake=lake) as kubeconfig:
        check(rendered(helm, kubeconfig, values), "")


@pytest.mark.parametrize(("name", "refused"), [("duemq", False), ("queue", True)])
def test_what_selects_the_pods_of_a_set_stays(helm, tmp_path, name, refused):
    """Kubernetes would refuse it, too, after other objects were changed."""
    labels = {"app.kubernetes.io/name": "duemq", "app.kubernetes.io/instance": "test"}
    spec = {
        "volumeClaimTemplates": [MADE],
        "selector": {"matchLabels": {**labels, "app.kubernetes.io/component": "broker"}},
    }
    given = f"nameOverride={name},fullnameOverride=test-duemq"
    with api_server(tmp_path, broker=spec) as kubeconfig:
        done = rendered(helm, kubeconfig, given)
    said = "nameOverride makes it queue, what selects the pods of the StatefulSet test-duemq-broker"
    check(done, said if refused else "")
