"""Every object that the chart makes, for several values, by Helm 3 and 4."""

import re
from collections import Counter

import kubernetes_validate
import pytest

from duemq_server.broker.settings import Settings
from duemq_server.replication.running.leading.handing_over import HAND_OVER_S

NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
QUANTITY = re.compile(r"[0-9]+(\.[0-9]+)?(m|k|Ki|M|Mi|G|Gi|T|Ti)?")
CLAIM = "PersistentVolumeClaim"
NOT_KUBERNETES_OWN = {"ServiceMonitor", "PrometheusRule"}
POD_NAME = "statefulset.kubernetes.io/pod-name"
# The oldest that Chart.yaml allows, the one of `make kind-test`, the newest known.
VERSIONS = ["1.28", "1.35", "1.37"]


def of_kind(objects, *kinds):
    return [one for one in objects if one["kind"] in kinds]


def pods(objects):
    """(name, labels, spec) of everything that becomes a pod."""
    for one in of_kind(objects, "StatefulSet", "Deployment"):
        template = one["spec"]["template"]
        yield one["metadata"]["name"], template["metadata"]["labels"], template["spec"]
    for one in of_kind(objects, "CronJob"):
        template = one["spec"]["jobTemplate"]["spec"]["template"]
        yield one["metadata"]["name"], template["metadata"]["labels"], template["spec"]
    for one in of_kind(objects, "Pod"):
        yield one["metadata"]["name"], one["metadata"]["labels"], one["spec"]


def containers(objects):
    return [
        container
        for _, _, spec in pods(objects)
        for container in (*spec.get("initContainers", ()), *spec["containers"])
    ]


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_every_object_is_valid_in_every_field(objects, version):
    for one in objects:
        if one["kind"] not in NOT_KUBERNETES_OWN:
            kubernetes_validate.validate(one, version, strict=True)


def test_the_kinds_are_those_that_we_mean(objects):
    found = set(Counter(one["kind"] for one in objects))
    always = {"ConfigMap", "Service", "StatefulSet", "PodDisruptionBudget", "Pod"}
    sometimes = {"ServiceAccount", *NOT_KUBERNETES_OWN, "Role", "RoleBinding"}
    sometimes |= {"CronJob", "Deployment", "PersistentVolumeClaim"}  # of traces
    sometimes |= {"NetworkPolicy"}
    assert always <= found <= always | sometimes


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


def test_selectors_find_exactly_one_set_of_pods_and_services_all_of_a_role(objects):
    def matching(selector):
        return [name for name, labels, _ in pods(objects) if selector.items() <= labels.items()]

    for one in of_kind(objects, "StatefulSet", "PodDisruptionBudget"):
        assert len(matching(one["spec"]["selector"]["matchLabels"])) == 1
    for one in of_kind(objects, "Service"):
        selector = dict(one["spec"]["selector"])
        pod = selector.pop(POD_NAME, None)  # which the set's controller puts on
        role = selector["app.kubernetes.io/component"]
        of_role = [name for name, _, _ in pods(objects) if f"-{role}" in name]
        assert matching(selector) == of_role
        assert pod is None or pod.rpartition("-")[0] in of_role


def test_every_set_has_its_own_budget_unless_there_is_none_of_the_role(objects):
    budgets = [one["metadata"]["name"] for one in of_kind(objects, "PodDisruptionBudget")]
    sets = [one["metadata"]["name"] for one in of_kind(objects, "StatefulSet")]
    assert set(budgets) <= set(sets)
    roles = {name.rstrip("-0123456789") for name in budgets}
    assert budgets == [name for name in sets if name.rstrip("-0123456789") in roles]


def test_selectors_never_hold_what_may_change(objects):
    for one in of_kind(objects, "StatefulSet"):
        assert set(one["spec"]["selector"]["matchLabels"]) - {"duemq/group"} == {
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
        assert headless["selector"].items() <= one["spec"]["selector"]["matchLabels"].items()


def test_ports_are_ports_and_services_point_at_them(objects):
    for one in of_kind(objects, "Service"):
        selector = one["spec"]["selector"].items() - {
            (POD_NAME, one["spec"]["selector"].get(POD_NAME))
        }
        for spec in [spec for _, labels, spec in pods(objects) if selector <= labels.items()]:
            named = {port["name"]: port for port in spec["containers"][0]["ports"]}
            for port in one["spec"]["ports"]:
                assert 1 <= port["port"] <= 65535
                assert named[port["targetPort"]]["containerPort"] == port["port"]


def test_services_say_whether_their_ports_speak_tls(objects):
    """A mesh or a gateway takes their word for it."""
    names = {env["name"] for each in containers(objects) for env in each.get("env", ())}
    expected = "https" if "DUEMQ_TLS_CERT" in names else "kubernetes.io/h2c"
    ports = [port for one in of_kind(objects, "Service") for port in one["spec"]["ports"]]
    assert {port["appProtocol"] for port in ports if port["name"] == "grpc"} == {expected}


def test_what_a_policy_lets_in_are_ports_of_the_pods_it_is_of(objects):
    for one in of_kind(objects, "NetworkPolicy"):
        assert one["spec"]["policyTypes"] == ["Ingress"]
        own = one["spec"]["podSelector"]["matchLabels"].items()
        assert all(own <= labels.items() for _, labels, _ in pods(objects))
        opened = [port["port"] for rule in one["spec"]["ingress"] for port in rule["ports"]]
        named = {port["name"] for each in containers(objects) for port in each.get("ports", ())}
        # What probes ask comes from the machine itself.
        assert set(opened) == named - {"health"}
        assert len(opened) == len(set(opened))


def test_probes_ask_the_grpc_port(objects):
    for one in of_kind(objects, "StatefulSet"):
        (container,) = one["spec"]["template"]["spec"]["containers"]
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            # They know no TLS: where there is a port for them, it is that.
            assert container[probe]["grpc"]["port"] == ports.get("health", ports["grpc"])
        assert container["livenessProbe"]["grpc"]["service"] == ""
        ready = container["readinessProbe"]["grpc"]["service"]
        labels = one["spec"]["template"]["metadata"]["labels"]
        assert ready.startswith("duemq.replication.v1." if "duemq/group" in labels else "duemq.v1.")


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
        for container in (*spec.get("initContainers", ()), *spec["containers"]):
            mounts = [mount["name"] for mount in container["volumeMounts"]]
            paths = [mount["mountPath"] for mount in container["volumeMounts"]]
            assert set(mounts) == volumes | claims.get(name, set())
            assert len(set(paths)) == len(paths)
        for volume in spec["volumes"]:
            if "configMap" in volume:
                assert volume["configMap"]["name"] in config_maps
            if "persistentVolumeClaim" in volume:
                claim = volume["persistentVolumeClaim"]["claimName"]
                assert claim in {c["metadata"]["name"] for c in of_kind(objects, CLAIM)}


def test_the_service_account_exists_or_is_somebody_elses(objects):
    made = {one["metadata"]["name"] for one in of_kind(objects, "ServiceAccount")}
    for _, _, spec in pods(objects):
        assert spec["serviceAccountName"] in made | {"default"}


def test_a_pod_has_a_token_only_for_its_lease(objects):
    for _, _, spec in pods(objects):
        (container,) = spec["containers"]
        own = "--lease-store=kubernetes" in container.get("args", ())
        assert spec["automountServiceAccountToken"] is own


def test_the_role_is_for_the_leases_of_the_groups(objects):
    roles = of_kind(objects, "Role")
    groups = {
        argument.removeprefix("--name=")
        for container in containers(objects)
        if "--lease-store=kubernetes" in container.get("args", ())
        for argument in container["args"]
        if argument.startswith("--name=")
    }
    assert bool(roles) == bool(groups) == bool(of_kind(objects, "RoleBinding"))
    for one in roles:
        create, change = one["rules"]
        for rule in (create, change):
            assert (rule["apiGroups"], rule["resources"]) == (["coordination.k8s.io"], ["leases"])
        assert create["verbs"] == ["create"]
        assert change["verbs"] == ["get", "update"]
        assert set(change["resourceNames"]) == groups
    for one in of_kind(objects, "RoleBinding"):
        assert one["roleRef"]["name"] == roles[0]["metadata"]["name"]
        (subject,) = one["subjects"]
        used = {spec["serviceAccountName"] for _, _, spec in pods(objects)}
        assert {subject["name"]} == used
        assert subject["namespace"] == one["metadata"]["namespace"]


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


def test_a_drain_does_not_wait_for_who_is_not_ready(objects):
    """Of one pod, one may be away; a pod that is not ready is away already, and none could go."""
    for one in of_kind(objects, "PodDisruptionBudget"):
        assert one["spec"]["unhealthyPodEvictionPolicy"] == "AlwaysAllow"


def test_the_grace_period_is_longer_than_the_drain(objects):
    for one in of_kind(objects, "StatefulSet"):
        assert one["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] >= 30


def test_replicas_have_the_time_to_hand_over(objects):
    for one in of_kind(objects, "StatefulSet"):
        spec = one["spec"]["template"]["spec"]
        if "duemq/group" in one["spec"]["template"]["metadata"]["labels"]:
            drain_s = Settings.__dataclass_fields__["drain_timeout"].default
            assert spec["terminationGracePeriodSeconds"] >= 2 * (drain_s + HAND_OVER_S)


def test_who_reads_its_data_before_it_serves_has_the_time_for_that(objects):
    """Killed half-way it would read them again, and again."""
    for one in of_kind(objects, "StatefulSet"):
        if "volumeClaimTemplates" in one["spec"]:
            [container] = one["spec"]["template"]["spec"]["containers"]
            startup = container["startupProbe"]
            assert startup["failureThreshold"] * startup["periodSeconds"] >= 600


def test_every_container_has_requests_and_a_memory_limit(objects):
    for container in containers(objects):
        assert {"cpu", "memory"} <= set(container["resources"]["requests"])
        assert "memory" in container["resources"]["limits"]
