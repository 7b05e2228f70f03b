"""Who calls is looked at before a method is, and with each request of a stream."""

from collections.abc import AsyncIterator

import pytest

from duemq.errors import PermissionDenied
from duemq.v1 import broker_pb2, group_pb2, message_pb2, timer_pb2
from duemq_server.serving.permissions.access import ACCESS, Permissions
from duemq_server.serving.permissions.rights import Action, Need, Policy, parse

SERVICE = '[[allow]]\nnames = ["cluster"]\nservice = true\n'
BILLING = SERVICE + '[[allow]]\nnames = ["me@example.org"]\ngroups = ["billing"]\n'


class Context:
    """gRPC's, of a caller with a certificate."""

    def __init__(self, **names: list[bytes]) -> None:
        self._names = names

    def auth_context(self) -> dict[str, list[bytes]]:
        return self._names


ME = Context(x509_common_name=[b"me"], x509_subject_alternative_name=[b"me@example.org"])


class Guarded:
    """Methods behind permissions that change."""

    def __init__(self, text: str) -> None:
        self.policy = parse(text)
        self.called: list[object] = []
        self.permissions = Permissions(self._policy)

    def _policy(self) -> Policy:
        return self.policy

    async def pull(self, request: broker_pb2.PullRequest, _: Context) -> str:
        self.called.append(request)
        return "pulled"

    async def stream(self, requests: AsyncIterator[broker_pb2.PullRequest], _: Context) -> None:
        async for request in requests:
            self.called.append(request)
            self.policy = parse(SERVICE)  # from now on nobody may

    async def watch(self, request: object, _: Context) -> AsyncIterator[int]:
        for number in range(2):
            self.called.append(number)
            yield number


def of(group: str) -> broker_pb2.PullRequest:
    return broker_pb2.PullRequest(group=group)


async def test_a_method_is_called_by_who_may():
    guarded = Guarded(BILLING)
    pull = guarded.permissions.around(guarded.pull, "/duemq.v1.Broker/Pull", requests=False)
    assert await pull(of("billing"), ME) == "pulled"
    with pytest.raises(PermissionDenied, match="me may not consume in group audit") as caught:
        await pull(of("audit"), ME)
    assert (caught.value.field, caught.value.value) == ("group", "audit")
    with pytest.raises(PermissionDenied, match="a certificate without names may not"):
        await pull(of("billing"), Context(x509_common_name=[b""]))
    nameless = Context(x509_common_name=[b""], x509_subject_alternative_name=[b"spiffe://me"])
    with pytest.raises(PermissionDenied, match="permissions: spiffe://me may not"):
        await pull(of("billing"), nameless)
    assert guarded.called == [of("billing")]


async def test_each_request_of_a_stream_is_looked_at_by_what_counts_then():
    guarded = Guarded(BILLING)
    path = "/duemq.v1.Broker/PullStream"
    stream = guarded.permissions.around(guarded.stream, path, requests=True)

    async def requests() -> AsyncIterator[broker_pb2.PullRequest]:
        while True:
            yield of("billing")

    with pytest.raises(PermissionDenied):
        await stream(requests(), ME)
    assert guarded.called == [of("billing")]


async def test_a_heartbeat_needs_what_its_hello_did():
    guarded = Guarded(SERVICE + '[[allow]]\nnames = ["me"]\ngroups = ["billing"]\n')
    events: list[str] = []

    async def join(requests: AsyncIterator[group_pb2.MemberEvent], _: Context) -> None:
        async for event in requests:
            events.append(str(event.WhichOneof("event")))
            if len(events) == 2:
                guarded.policy = parse(SERVICE)

    async def requests() -> AsyncIterator[group_pb2.MemberEvent]:
        yield group_pb2.MemberEvent(hello=group_pb2.Hello(group="billing"))
        while True:
            yield group_pb2.MemberEvent(heartbeat=group_pb2.Heartbeat())

    member = guarded.permissions.around(join, "/duemq.v1.GroupCoordinator/Join", requests=True)
    with pytest.raises(PermissionDenied, match="group billing"):
        await member(requests(), ME)
    assert events == ["hello", "heartbeat"]


async def test_names_cannot_write_into_the_log(caplog):
    guarded = Guarded(SERVICE)
    pull = guarded.permissions.around(guarded.pull, "/duemq.v1.Broker/Pull", requests=False)
    with pytest.raises(PermissionDenied, match=r"'me\\nERROR' may not"):
        await pull(of("g"), Context(x509_common_name=[b"me\nERROR"]))
    with pytest.raises(PermissionDenied, match=r"in group 'audit\\nERROR") as caught:
        await pull(of("audit\nERROR" + 1_000 * "!"), ME)
    assert len(caught.value.message) < 500


async def test_a_method_that_generates_stays_one():
    guarded = Guarded(BILLING)
    path = "/duemq.v1.Nameserver/WatchRoutes"
    watch = guarded.permissions.around(guarded.watch, path, requests=False)
    assert [answer async for answer in watch(None, ME)] == [0, 1]
    with pytest.raises(PermissionDenied):
        await anext(watch(None, Context(x509_common_name=[b"stranger"])))
    assert guarded.called == [0, 1]


async def test_each_answer_of_a_stream_is_looked_at_by_what_counts_then():
    guarded = Guarded(BILLING)
    path = "/duemq.v1.Nameserver/WatchRoutes"
    watch = guarded.permissions.around(guarded.watch, path, requests=False)(None, ME)
    assert await anext(watch) == 0
    guarded.policy = parse(SERVICE)
    with pytest.raises(PermissionDenied, match="me may not do anything"):
        await anext(watch)


async def test_who_is_in_no_entry_may_not_even_ask_for_nothing():
    guarded = Guarded(SERVICE)
    cancel = guarded.permissions.around(guarded.pull, "/duemq.v1.Timer/Cancel", requests=False)
    with pytest.raises(PermissionDenied, match="me may not do anything"):
        await cancel(timer_pb2.CancelRequest(), ME)

    async def requests() -> AsyncIterator[group_pb2.MemberEvent]:
        yield group_pb2.MemberEvent(heartbeat=group_pb2.Heartbeat())

    path = "/duemq.v1.GroupCoordinator/Join"
    member = guarded.permissions.around(guarded.stream, path, requests=True)
    with pytest.raises(PermissionDenied, match="me may not do anything"):
        await member(requests(), ME)
    assert not guarded.called


async def test_what_fails_one_by_one_is_asked_where_it_is_taken():
    guarded = Guarded(SERVICE + '[[allow]]\nnames = ["me"]\nsend = ["orders"]\n')
    refused: list[bool] = []

    async def send(*_: object) -> None:
        access = ACCESS.get()
        assert access is not None
        refused.extend(
            bool(access.refusal(Need(Action.SEND, topic))) for topic in ("orders", "other")
        )

    await guarded.permissions.around(send, "/duemq.v1.Broker/Send", requests=False)(None, ME)
    assert refused == [False, True]


async def test_refusals_are_logged_now_and_then(caplog):
    guarded = Guarded(BILLING)
    pull = guarded.permissions.around(guarded.pull, "/duemq.v1.Broker/Pull", requests=False)
    for _ in range(3):
        with pytest.raises(PermissionDenied):
            await pull(of("audit"), ME)
    assert caplog.text.count("refused: permissions: me may not") == 1


async def test_who_names_a_timer_by_its_handle_is_told_what_that_needs():
    guarded = Guarded(SERVICE + '[[allow]]\nnames = ["me"]\nsend = ["orders"]\n')
    cancel = guarded.permissions.around(guarded.pull, "/duemq.v1.Timer/Cancel", requests=False)
    request = timer_pb2.CancelRequest(handles=[message_pb2.TimerHandle(offset=1)])
    with pytest.raises(PermissionDenied, match=r"send to topic \*: what is named by a handle"):
        await cancel(request, ME)
