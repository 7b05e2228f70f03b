"""Every object that the chart makes, for several values, by Helm 3 and 4."""

import re
from collections import Counter

import kubernetes_validate
import pytest

NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
QUANTITY = re.compile(r"[0-9]+(\.[0-9]+)?(m|k|Ki|M|Mi|G|Gi|T|Ti)?")
NOT_KUBERNETES_OWN = {"ServiceMonitor"}
# The oldest that Chart.yaml allows, the one of `make kind-test`, the newest known.
VERSIONS = ["1.28", "1.35", "1.37"]


def of_kind(objects, *kinds):
    return [one for one in objects if one["kind"] in kinds]


def pods(objects):
    """(name, labels, spec) of everything that becomes a pod."""
    for one in of_kind(objects, "StatefulSet"):
        template = one["spec"]["template"]
        yield one["metadata"]["name"], template["metadata"]["labels"], template["spec"]
    for one in of_kind(objects, "Pod"):
        yield one["metadata"]["name"], one["metadata"]["labels"], one["spec"]


def containers(objects):
    return [container for _, _, spec in pods(objects) for container in spec["containers"]]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_every_object_is_valid_in_every_field(objects, version):
    for one in objects:
        if one["kind"] not in NOT_KUBERNETES_OWN:
            kubernetes_validate.validate(one, version, strict=True)


def test_the_kinds_are_those_that_we_mean(objects):
    found = set(Counter(one["kind"] for one in objects))
    always = {"ConfigMap", "Service", "StatefulSet", "PodDisruptionBudget", "Pod"}
    assert always <= found <= always | {"ServiceAccount", "ServiceMonitor"}
    assert len(of_kind(objects, "StatefulSet")) == 3


def test_objects_have_names_that_kubernetes_takes_and_nobody_has_twice(objects):
    names = Counter((one["kind"], one["metadata"]["name"]) for one in objects)
    assert max(names.values()) == 1
    for _, name in names:
        assert NAME.fullmatch(name)
        assert len(name) <= 63 - len("-00")


def test_objects_are_labelled_as_the_releases(objects):
    for one in objects:
        if not one["metadata"]["name"].endswith("-extra"):
            labels = one["metadata"]["labels"]
            assert labels["app.kubernetes.io/instance"] == "test"
            assert labels["app.kubernetes.io/managed-by"] == "Helm"


def test_selectors_find_exactly_one_set_of_pods(objects):
    selectors = [one["spec"]["selector"] for one in of_kind(objects, "Service")]
    sets = of_kind(objects, "StatefulSet", "PodDisruptionBudget")
    selectors += [one["spec"]["selector"]["matchLabels"] for one in sets]
    for selector in selectors:
        matching = [name for name, labels, _ in pods(objects) if selector.items() <= labels.items()]
        assert len(matching) == 1, selector


def test_selectors_never_hold_what_may_change(objects):
    for one in of_kind(objects, "StatefulSet"):
        assert set(one["spec"]["selector"]["matchLabels"]) == {
            "app.kubernetes.io/name",
            "app.kubernetes.io/instance",
            "app.kubernetes.io/component",
        }


def test_every_set_has_its_headless_service_that_names_pods_before_they_are_ready(objects):
    services = {one["metadata"]["name"]: one["spec"] for one in of_kind(objects, "Service")}
    for one in of_kind(objects, "StatefulSet"):
        headless = services[one["spec"]["serviceName"]]
        assert headless["clusterIP"] == "None"
        assert headless["publishNotReadyAddresses"] is True
        assert headless["selector"] == one["spec"]["selector"]["matchLabels"]


def test_ports_are_ports_and_services_point_at_them(objects):
    for one in of_kind(objects, "Service"):
        selector = one["spec"]["selector"].items()
        (spec,) = [spec for _, labels, spec in pods(objects) if selector <= labels.items()]
        named = {port["name"]: port for port in spec["containers"][0]["ports"]}
        for port in one["spec"]["ports"]:
            assert 1 <= port["port"] <= 65535
            assert named[port["targetPort"]]["containerPort"] == port["port"]


def test_probes_ask_the_grpc_port(objects):
    for one in of_kind(objects, "StatefulSet"):
        (container,) = one["spec"]["template"]["spec"]["containers"]
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert container[probe]["grpc"]["port"] == ports["grpc"]
        assert container["livenessProbe"]["grpc"]["service"] == ""
        assert container["readinessProbe"]["grpc"]["service"].startswith("duemq.v1.")


def test_every_mount_has_its_volume_and_every_volume_its_source(objects):
    config_maps = {one["metadata"]["name"] for one in of_kind(objects, "ConfigMap")}
    claims = {
        one["metadata"]["name"]: {
            claim["metadata"]["name"] for claim in one["spec"].get("volumeClaimTemplates", ())
        }
        for one in of_kind(objects, "StatefulSet")
    }
    for name, _, spec in pods(objects):
        volumes = {volume["name"] for volume in spec["volumes"]}
        assert len(volumes) == len(spec["volumes"])
        assert not volumes & claims.get(name, set())
        for container in spec["containers"]:
            mounts = [mount["name"] for mount in container["volumeMounts"]]
            paths = [mount["mountPath"] for mount in container["volumeMounts"]]
            assert set(mounts) == volumes | claims.get(name, set())
            assert len(set(paths)) == len(paths)
        for volume in spec["volumes"]:
            if "configMap" in volume:
                assert volume["configMap"]["name"] in config_maps


def test_the_service_account_exists_or_is_somebody_elses(objects):
    made = {one["metadata"]["name"] for one in of_kind(objects, "ServiceAccount")}
    for _, _, spec in pods(objects):
        assert spec["serviceAccountName"] in made | {"default"}
        assert spec["automountServiceAccountToken"] is False


def test_pods_obey_the_restricted_standard(objects):
    for _, _, spec in pods(objects):
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["runAsUser"] == 10001
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in containers(objects):
        context = container["securityContext"]
        assert context["allowPrivilegeEscalation"] is False
        assert context["readOnlyRootFilesystem"] is True
        assert context["capabilities"] == {"drop": ["ALL"]}


def test_kubernetes_own_variables_do_not_pass_for_settings(objects):
    for _, _, spec in pods(objects):
        assert spec["enableServiceLinks"] is False


def test_quantities_can_be_read(objects):
    for container in containers(objects):
        for amounts in container["resources"].values():
            assert all(QUANTITY.fullmatch(str(amount)) for amount in amounts.values())
    for one in of_kind(objects, "StatefulSet"):
        for claim in one["spec"].get("volumeClaimTemplates", ()):
            assert QUANTITY.fullmatch(claim["spec"]["resources"]["requests"]["storage"])


def test_enums_that_the_schemas_leave_open(objects):
    for container in containers(objects):
        assert container["imagePullPolicy"] in {"Always", "IfNotPresent", "Never"}
    for _, _, spec in pods(objects):
        for spread in spec.get("topologySpreadConstraints", ()):
            assert spread["whenUnsatisfiable"] in {"ScheduleAnyway", "DoNotSchedule"}
    for one in of_kind(objects, "StatefulSet"):
        assert one["spec"]["podManagementPolicy"] == "Parallel"
        assert one["spec"]["updateStrategy"]["type"] in {"RollingUpdate", "OnDelete"}
    for one in of_kind(objects, "Service"):
        assert one["spec"].get("type", "ClusterIP") in {"ClusterIP", "NodePort", "LoadBalancer"}


def test_a_budget_names_one_bound(objects):
    for one in of_kind(objects, "PodDisruptionBudget"):
        assert ("maxUnavailable" in one["spec"]) != ("minAvailable" in one["spec"])


def test_the_grace_period_is_longer_than_the_drain(objects):
    for one in of_kind(objects, "StatefulSet"):
        assert one["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] >= 30


def test_every_container_has_requests_and_a_memory_limit(objects):
    for container in containers(objects):
        assert {"cpu", "memory"} <= set(container["resources"]["requests"])
        assert "memory" in container["resources"]["limits"]
