"""The SDK's surface, pinned: a name that comes or goes is a decision."""

import dataclasses
import inspect
import math
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import get_type_hints

import pytest

import duemq
from duemq import aio, testing
from duemq.producing.intake import Intake
from duemq.settings import nameservers_of
from duemq.testing import MemoryCluster
from duemq.testing import aio as testing_aio
from duemq.testing.aio import MemoryCluster as AioMemoryCluster

NAMES = {
    "Admin",
    "BatchFailed",
    "CancelOutcome",
    "ClientSettings",
    "ConsumerSettings",
    "DeadLetter",
    "DuemqError",
    "FireOutcome",
    "Message",
    "Outgoing",
    "PendingReceipt",
    "Producer",
    "ProducerSettings",
    "PullConsumer",
    "PushConsumer",
    "Receipt",
    "Receipts",
    "RescheduleOutcome",
    "Rescheduled",
    "RetryLater",
    "SendOptions",
    "Sql",
    "Tls",
}


def public(kind):
    return {name for name in dir(kind) if not name.startswith("_")}


def signature_of(function):
    return list(inspect.signature(function).parameters.values())


def test_names():
    assert set(duemq.__all__) == NAMES | {"aio", "errors", "tune_process"}
    assert set(aio.__all__) == NAMES
    for name in duemq.__all__:
        assert getattr(duemq, name) is not None
    assert set(dir(duemq)) >= set(duemq.__all__)


@pytest.mark.parametrize("module", [testing, testing_aio])
def test_names_for_tests_of_applications(module):
    assert set(module.__all__) == {"ConsumerOptions", "MemoryCluster", "Pending"}
    for name in module.__all__:
        assert getattr(module, name).__name__ == name


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'Produzer'"):
        duemq.Produzer  # noqa: B018


@pytest.mark.parametrize(
    ("name", "only_blocking", "only_asyncio"),
    [
        ("Admin", set(), {"start"}),
        ("Producer", set(), {"start", "ready"}),
        ("PullConsumer", set(), {"pulled", "refused"}),
        ("PushConsumer", {"group", "settings"}, {"begin_close", "in_callback"}),  # of instances
    ],
)
def test_both_faces_have_the_same_methods_and_parameters(name, only_blocking, only_asyncio):
    blocking, awaiting = getattr(duemq, name), getattr(aio, name)
    assert public(blocking) - public(awaiting) == only_blocking
    assert public(awaiting) - public(blocking) == only_asyncio
    for method in (public(blocking) & public(awaiting)) | {"__init__"}:
        ours, theirs = getattr(blocking, method), getattr(awaiting, method)
        assert not inspect.iscoroutinefunction(ours)
        assert not inspect.isasyncgenfunction(ours)
        if isinstance(ours, property):
            continue
        assert inspect.getdoc(ours)
        kinds = [
            [each.replace(annotation=None) if each.name == "on_error" else each for each in listed]
            for listed in (signature_of(ours), signature_of(theirs))
        ]
        assert kinds[0] == kinds[1]


@pytest.mark.parametrize("name", ["Admin", "Producer"])
def test_what_waits_is_awaited(name):
    awaiting = getattr(aio, name)
    for method in public(awaiting) & public(getattr(duemq, name)):
        theirs = getattr(awaiting, method)
        waits = inspect.iscoroutinefunction(theirs) or inspect.isasyncgenfunction(theirs)
        assert waits is (method != "submit")


def test_send_options_are_the_same_everywhere():
    options = get_type_hints(duemq.SendOptions)
    outgoing = get_type_hints(duemq.Outgoing)
    assert {name: outgoing[name] for name in options} == options
    fields = [field.name for field in dataclasses.fields(duemq.Outgoing)]
    assert fields == ["body", *options]
    for producer in (duemq.Producer, aio.Producer):
        written_out = get_type_hints(producer.submit)
        assert {name: written_out[name] for name in options} == options
        named = signature_of(producer.submit)
        assert [each.name for each in named if each.kind is each.KEYWORD_ONLY] == list(options)


@pytest.mark.parametrize("call", ["send", "submit", "send_many"])
async def test_an_unknown_option_is_a_type_error(call):
    sent = [b"x"] if call == "send_many" else b"x"
    cluster = MemoryCluster()
    with pytest.raises(TypeError, match="'kye'"), cluster.producer() as producer:
        getattr(producer, call)("t", sent, kye="k")
    assert cluster.messages("t") == []
    cluster = AioMemoryCluster()
    with pytest.raises(TypeError, match="'kye'"):
        async with cluster.producer() as producer:
            await getattr(producer, call)("t", sent, kye="k")
    assert cluster.messages("t") == []


@pytest.mark.parametrize("name", sorted(NAMES))
def test_everything_public_is_documented(name):
    kind = getattr(duemq, name)
    assert inspect.getdoc(kind)
    for method in public(kind):
        if callable(getattr(kind, method)):
            assert inspect.getdoc(getattr(kind, method)), f"{name}.{method}"


@pytest.mark.parametrize("name", ["ClientSettings", "ConsumerSettings", "ProducerSettings"])
def test_every_setting_is_in_the_readme(name):
    readme = (Path(__file__).resolve().parents[3] / "sdk" / "README.md").read_text()
    for setting in dataclasses.fields(getattr(duemq, name)):
        assert f"`{setting.name}`" in readme


@pytest.mark.parametrize(
    ("field", "value"),
    [("send_timeout_s", 0), ("buffer_bytes", -1), ("frame_bytes", 1 << 30), ("in_flight", 65)],
)
def test_settings_are_checked(field, value):
    with pytest.raises(duemq.errors.InvalidArgument) as raised:
        duemq.ProducerSettings(**{field: value})
    assert (raised.value.field, raised.value.value) == (field, str(value))
    assert raised.value.limit


@pytest.mark.parametrize("name", ["ClientSettings", "ConsumerSettings", "ProducerSettings"])
@pytest.mark.parametrize(
    "value", [None, "5s", b"x", math.nan, math.inf, 1e30, timedelta(5), [], 5j]
)
def test_settings_of_another_type_are_refused(name, value):
    """Also what would only fail when it is used."""
    kind = getattr(duemq, name)
    for setting in dataclasses.fields(kind):
        if setting.name == "start_from" or (setting.type is str and isinstance(value, str)):
            continue
        if setting.name == "tls" and value is None:
            continue
        with pytest.raises(duemq.errors.InvalidArgument) as raised:
            kind(**{setting.name: value})
        assert raised.value.field == setting.name


@pytest.mark.parametrize("faces", [duemq, aio])
@pytest.mark.parametrize(
    ("field", "make"),
    [
        ("settings", lambda faces: faces.Producer("a", settings={"in_flight": 3})),
        ("settings", lambda faces: faces.Admin("a", settings=5)),
        ("settings", lambda faces: faces.PullConsumer("g", nameserver="a", settings={})),
        ("settings", lambda faces: faces.PushConsumer("g", "t", print, settings={})),
        ("batch", lambda faces: faces.PushConsumer("g", "t", print, batch=100)),
        ("broadcast", lambda faces: faces.PushConsumer("g", "t", print, broadcast="false")),
        ("nameserver", lambda faces: faces.Producer(b"127.0.0.1")),
        ("nameserver", lambda faces: faces.Admin(9876)),
        ("on_error", lambda faces: faces.Producer("a", on_error=3)),
        ("on_error", lambda faces: faces.Producer("a", on_error=never_run)),
    ],
)
def test_clients_are_not_made_of_anything_else(faces, field, make):
    with pytest.raises(duemq.errors.InvalidArgument) as raised:
        make(faces)
    assert raised.value.field == field


def test_a_list_of_messages_is_one():
    common = duemq.Outgoing(b"")
    for wrong in (None, 5, b"x", "x"):
        with pytest.raises(duemq.errors.InvalidArgument) as raised:
            next(Intake.chunks(None, wrong, common))
        assert raised.value.field == "messages"


async def never_run(receipt, error):
    """Nobody awaits what `on_error` returns."""


@pytest.mark.parametrize(
    "wrong",
    [
        *["", " , ", "host:", ":9876", "host:port", "host:0", "host:70000", "::1", "fe80::1:9876"],
        *["a:1;b:1", "a:1 b:1", "a b", "a;", "[::1]:1;[::1]:2", "[::1];[::1]"],
    ],
)
def test_illegal_nameservers(wrong):
    with pytest.raises(duemq.errors.InvalidArgument) as raised:
        aio.Producer(wrong)
    assert raised.value.field == "nameserver"


def test_nameservers():
    assert nameservers_of("a, b:1,") == ("a:9876", "b:1")
    assert nameservers_of(["[::1]", "[::1]:5"]) == ("[::1]:9876", "[::1]:5")
    assert nameservers_of(["dns:a:5", "ipv6:[::1]:5"]) == ("dns:a:5", "ipv6:[::1]:5")  # gRPC's own


def test_names_are_loaded_when_they_are_used():
    code = (
        "import sys, duemq, duemq.errors\n"
        "from duemq.protocol import balance, due, route\n"
        "assert not {'grpc', 'google.protobuf', 'asyncio'} & set(sys.modules)\n"
        "duemq.Producer\n"
        "assert 'grpc' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=60)
