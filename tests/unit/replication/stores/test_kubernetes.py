"""The store of records in Leases of Kubernetes, against an API server of our own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from lightkube import Client, KubeConfig

from duemq_server.replication.protocol import record as records
from duemq_server.replication.protocol.record import HeldRecord
from duemq_server.replication.stores import kubernetes, lease_api
from duemq_server.replication.stores.kubernetes import KubernetesStore
from duemq_server.replication.stores.store import Conflict, StoreError
from tests.unit.replication.stores.contract import RECORD, WAIT_S, A, B, StoreContract, found
from tests.unit.replication.stores.fake_api_server import Answer, FakeApiServer, Refusal


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeApiServer]:
    monkeypatch.setattr(lease_api, "CALL_TIMEOUT_S", WAIT_S)  # it answers, if it is slow
    server = FakeApiServer()
    yield server
    server.stop()


@pytest.fixture
def open_store(server: FakeApiServer, tmp_path: Path) -> Iterator[Callable[[], KubernetesStore]]:
    opened: list[KubernetesStore] = []

    def open_() -> KubernetesStore:
        opened.append(KubernetesStore("g", lease_s=6, config=server.config(tmp_path)))
        return opened[-1]

    yield open_
    for each in opened:
        each.close()


@pytest.fixture
def store(open_store: Callable[[], KubernetesStore]) -> KubernetesStore:
    return open_store()


class TestKubernetesStore(StoreContract):
    """Of Leases."""


def lease_of(server: FakeApiServer) -> dict:
    return server.leases["messages", "g"]


def once(answer: Answer, *methods: str) -> Callable[[str], Answer | None]:
    """A fault of the next request of one of the methods."""
    answers = [answer]
    return lambda method: answers.pop() if answers and method in methods else None


# -- the record


def test_no_version_comes_again_after_the_lease_was_deleted(
    store: KubernetesStore, server: FakeApiServer
) -> None:
    first = store.swap(None, RECORD)
    server.leases.clear()
    assert store.read() is None
    with pytest.raises(Conflict) as conflict:
        store.swap(first, RECORD)
    assert conflict.value.found is None
    assert store.swap(None, RECORD) != first


def test_a_swap_that_is_late_does_nothing_to_a_lease_that_was_made_anew(
    store: KubernetesStore, open_store: Callable[[], KubernetesStore], server: FakeApiServer
) -> None:
    first = store.swap(None, RECORD)
    other = open_store()

    def made_anew(method: str) -> None:
        """Between what the swap reads and what it writes."""
        if method == "PUT":
            server.before = lambda method: None
            old = server.leases.pop(("messages", "g"))
            other.swap(None, RECORD)
            # Even of the same resourceVersion, as a store that was restored may show it.
            lease_of(server)["metadata"]["resourceVersion"] = old["metadata"]["resourceVersion"]

    server.before = made_anew
    with pytest.raises(Conflict) as conflict:
        store.swap(first, records.with_member(RECORD, "c"))
    assert conflict.value.found == HeldRecord(found(other).version, RECORD)


@pytest.mark.parametrize(
    "annotations",
    [{"record": "[]"}, {"record": '{"format":9}'}, {"record": None}, {"version": None}],
)
def test_what_is_not_a_record_is_an_error_and_is_not_replaced(
    annotations: dict, store: KubernetesStore, server: FakeApiServer
) -> None:
    store.swap(None, RECORD)
    server.change("g", **annotations)
    before = dict(lease_of(server)["metadata"]["annotations"])
    for call in (store.read, lambda: store.swap(None, RECORD), lambda: store.renew(A)):
        with pytest.raises(StoreError, match="Lease g"):
            call()
    assert lease_of(server)["metadata"]["annotations"] == before


# -- the lease


def test_a_renewal_is_one_request(store: KubernetesStore, server: FakeApiServer) -> None:
    store.swap(None, RECORD)
    store.renew(A)
    server.calls.clear()
    for _ in range(5):
        store.renew(A)
    assert server.calls == {"PUT": 5}
    assert found(store).record == RECORD


def test_a_renewal_loses_no_change_of_the_record(
    store: KubernetesStore, open_store: Callable[[], KubernetesStore]
) -> None:
    version = store.swap(None, RECORD)
    store.renew(A)
    changed = records.with_member(RECORD, "c")
    version = open_store().swap(version, changed)
    store.renew(A)  # it had seen the record as it was
    assert found(store).record == changed
    assert found(store).version == version


def test_renewals_and_changes_of_the_record_meet(store: KubernetesStore) -> None:
    store.swap(None, RECORD)
    store.renew(A)
    ended = threading.Event()
    failures: list[BaseException] = []

    def renew() -> None:
        try:
            while not ended.is_set():
                store.renew(A)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=renew)
    thread.start()
    for _ in range(8):
        there = found(store)
        changed = records.with_in_sync(there.record, there.record.in_sync)
        while True:
            try:
                store.swap(there.version, changed)
                break
            except StoreError as error:  # there is no wait between renewals here
                assert "too often" in str(error)  # noqa: PT017
    ended.set()
    thread.join(WAIT_S)
    assert all("too often" in str(each) for each in failures)
    assert found(store).record.revision == RECORD.revision + 8


def test_a_lease_that_was_renewed_before_the_takeover_begins_with_it(
    store: KubernetesStore, server: FakeApiServer
) -> None:
    store.renew(A)
    assert store.read() is None
    store.swap(None, RECORD)
    assert found(store).lease is not None
    spec = lease_of(server)["spec"]
    assert spec["holderIdentity"] == str(A)
    assert spec["leaseDurationSeconds"] == 6


def test_the_lease_is_of_who_leads(
    store: KubernetesStore, open_store: Callable[[], KubernetesStore], server: FakeApiServer
) -> None:
    version = store.swap(None, RECORD)
    store.renew(A)
    transitions = lease_of(server)["spec"]["leaseTransitions"]
    other = open_store()
    other.read()
    store.swap(version, replace(RECORD, leader=B, epoch=5))
    assert found(store).lease is None
    assert lease_of(server)["spec"].get("holderIdentity") is None
    assert lease_of(server)["spec"]["leaseTransitions"] == transitions + 1
    other.renew(B)
    first = found(store).lease
    assert first is not None
    with pytest.raises(StoreError, match=f"{B} leads g"):
        store.renew(A)
    store.release(A)
    assert found(store).lease == first


def test_who_has_a_lease_is_not_relieved_when_it_was_renewed_since_the_last_look(
    store: KubernetesStore, open_store: Callable[[], KubernetesStore]
) -> None:
    store.swap(None, RECORD)
    store.renew(A)
    other = open_store()
    there = found(other)
    store.renew(A)
    other.renew(B)
    taken = replace(RECORD, leader=B, epoch=5)
    with pytest.raises(Conflict) as conflict:
        other.swap(there.version, taken)
    assert conflict.value.found == found(store)
    other.swap(found(other).version, taken)
    assert found(store).record == taken
    assert found(store).lease is not None


def test_a_lease_is_released(store: KubernetesStore, server: FakeApiServer) -> None:
    store.swap(None, RECORD)
    store.renew(A)
    store.release(A)
    assert found(store).lease is None
    assert found(store).record == RECORD
    store.release(A)
    # Who was to take over and did not has none either.
    store.renew(B)
    store.release(B)
    store.swap(found(store).version, replace(RECORD, leader=B, epoch=5))
    assert found(store).lease is None


def test_a_leader_that_is_started_anew_has_its_lease(
    store: KubernetesStore, open_store: Callable[[], KubernetesStore]
) -> None:
    store.swap(None, RECORD)
    store.renew(A)
    first = found(store).lease
    open_store().renew(A)
    assert found(store).lease not in (None, first)


def test_a_leader_whose_lease_was_deleted_is_told(
    store: KubernetesStore, server: FakeApiServer
) -> None:
    store.swap(None, RECORD)
    store.renew(A)
    server.leases.clear()
    with pytest.raises(StoreError, match="nobody leads g"):
        store.renew(A)
    assert server.leases == {}


def test_a_lease_without_a_fraction_of_a_second_is_written_with_one(
    store: KubernetesStore, server: FakeApiServer
) -> None:
    store.swap(None, RECORD)
    store.renew(A)
    for key in ("acquireTime", "renewTime"):
        lease_of(server)["spec"][key] = "2026-11-22T10:00:00.000000Z"
    store.read()
    store.renew(A)  # the server refuses other forms
    store.release(A)


# -- a server that fails


@pytest.mark.parametrize("code", [403, 410, 429, 500, 503, 504])
def test_a_refusal_says_what_the_server_said(
    code: int, store: KubernetesStore, server: FakeApiServer
) -> None:
    version = store.swap(None, RECORD)
    for call in (store.read, lambda: store.renew(A), lambda: store.swap(version, RECORD)):
        server.before = once(Refusal(code, "Reason").answer, "GET", "PUT")
        with pytest.raises(StoreError, match=rf"Lease g: {code}: Reason"):
            call()
    assert found(store) == HeldRecord(version, RECORD)


def test_what_is_between_answers_without_a_content_type(
    store: KubernetesStore, server: FakeApiServer
) -> None:
    server.before = once((502, {"text": "bad gateway"}), "GET")
    with pytest.raises(StoreError):
        store.read()
    server.before = once((200, {"text": "<html>"}), "GET")
    with pytest.raises(StoreError):
        store.read()
    assert store.read() is None


@pytest.mark.parametrize("answer", [(0, {}), Refusal(504, "Timeout").answer])
def test_an_answer_that_is_lost_says_nothing_and_the_request_is_not_sent_again(
    answer: Answer, store: KubernetesStore, server: FakeApiServer
) -> None:
    version = store.swap(None, RECORD)
    changed = records.with_member(RECORD, "c")
    server.after = once(answer, "PUT")
    server.calls.clear()
    with pytest.raises(StoreError):
        store.swap(version, changed)
    assert server.calls["PUT"] == 1
    # It was done.
    with pytest.raises(Conflict) as conflict:
        store.swap(version, changed)
    assert conflict.value.found is not None
    assert conflict.value.found.record == changed


def test_a_server_that_hangs_is_away_and_comes_back(
    store: KubernetesStore, server: FakeApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = store.swap(None, RECORD)
    store.renew(A)
    store.close()  # the next call makes a client, which is less patient
    free = threading.Event()
    server.before = lambda method: free.wait(WAIT_S) and None
    try:
        with monkeypatch.context() as patch:
            patch.setattr(lease_api, "CALL_TIMEOUT_S", 0.2)
            for call in (store.read, lambda: store.renew(A), lambda: store.swap(version, RECORD)):
                with pytest.raises(StoreError, match="ReadTimeout"):
                    call()
    finally:
        free.set()
    server.before = lambda method: None
    assert found(store).record == RECORD
    store.renew(A)


def test_a_client_that_another_thread_closed_meanwhile_is_a_store_that_is_away(
    store: KubernetesStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call that fails closes the client of both threads, of the one that renews as well."""
    version = store.swap(None, RECORD)
    store.renew(A)
    connected = lease_api.LeaseApi._connected

    def closed_meanwhile(api: lease_api.LeaseApi) -> Client:
        client = connected(api)
        api.close()
        return client

    for call in (store.read, lambda: store.renew(A), lambda: store.swap(version, RECORD)):
        with monkeypatch.context() as patch:
            patch.setattr(lease_api.LeaseApi, "_connected", closed_meanwhile)
            with pytest.raises(StoreError, match="closed"):
                call()
    store.renew(A)


def test_a_server_that_is_not_there_is_away(store: KubernetesStore, server: FakeApiServer) -> None:
    server.url = "http://127.0.0.1:1"
    with pytest.raises(StoreError, match="ConnectError"):
        store.read()


def test_a_token_that_was_rotated_is_read_anew(
    store: KubernetesStore, server: FakeApiServer, tmp_path: Path
) -> None:
    version = store.swap(None, RECORD)
    server.token = "token-2"
    with pytest.raises(StoreError, match="Lease g: 401"):
        store.read()
    (tmp_path / "token").write_text("token-2\n")
    assert found(store).version == version
    (tmp_path / "token").unlink()
    server.token = "token-3"
    with pytest.raises(StoreError, match="not found"):
        store.read()


def test_a_write_gives_up_when_the_lease_changes_each_time(
    store: KubernetesStore, server: FakeApiServer
) -> None:
    version = store.swap(None, RECORD)

    def other_writes(method: str) -> None:
        if method == "PUT":
            server.change("g", lease="another")

    server.before = other_writes
    server.calls.clear()
    with pytest.raises(StoreError, match="changes too often"):
        store.swap(version, records.with_member(RECORD, "c"))
    assert server.calls["PUT"] == kubernetes.ATTEMPTS
    server.before = lambda method: None
    store.swap(version, records.with_member(RECORD, "c"))


def test_in_a_pod_the_store_is_the_clusters(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "token").write_text("t")
    (tmp_path / "namespace").write_text("messages")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "fd00::1")
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "443")
    config = KubeConfig.from_env(service_account=tmp_path).get()
    assert config is not None
    assert config.cluster.server == "https://[fd00::1]:443"
    assert config.cluster.certificate_auth == str(tmp_path / "ca.crt")
    assert config.namespace == "messages"


def test_a_namespace_wins_over_the_pods(server: FakeApiServer, tmp_path: Path) -> None:
    store = KubernetesStore("g", lease_s=6, namespace="others", config=server.config(tmp_path))
    store.swap(None, RECORD)
    store.close()
    assert list(server.leases) == [("others", "g")]
