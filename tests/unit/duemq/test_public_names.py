"""The SDK's surface, pinned: a name that comes or goes is a decision."""

import dataclasses
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import duemq
from duemq import aio
from duemq.transport.cluster_client import nameservers_of

NAMES = {
    "Admin",
    "BatchFailed",
    "CancelOutcome",
    "ClientSettings",
    "ConsumerSettings",
    "DeadLetter",
    "DuemqError",
    "Message",
    "Outgoing",
    "PendingReceipt",
    "Producer",
    "ProducerSettings",
    "PullConsumer",
    "PushConsumer",
    "Receipt",
    "Receipts",
    "RetryLater",
    "Sql",
}
BOTH = ["Admin", "Producer", "PullConsumer", "PushConsumer"]


def public(kind):
    return {name for name in vars(kind) if not name.startswith("_")}


def test_names():
    assert set(duemq.__all__) == NAMES | {"aio", "errors", "tune_process"}
    assert set(aio.__all__) == NAMES
    for name in duemq.__all__:
        assert getattr(duemq, name) is not None
    assert set(dir(duemq)) >= set(duemq.__all__)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'Produzer'"):
        duemq.Produzer  # noqa: B018


@pytest.mark.parametrize("name", ["Producer", "Admin"])
def test_both_faces_have_the_same_methods_and_parameters(name):
    blocking, awaiting = getattr(duemq, name), getattr(aio, name)
    assert public(blocking) == public(awaiting) - {"start", "ready"}
    for method in public(blocking):
        ours, theirs = getattr(blocking, method), getattr(awaiting, method)
        assert list(inspect.signature(ours).parameters.values()) == list(
            inspect.signature(theirs).parameters.values()
        )
        waits = inspect.iscoroutinefunction(theirs) or inspect.isasyncgenfunction(theirs)
        assert waits is (method != "submit")
        assert not inspect.iscoroutinefunction(ours)


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


@pytest.mark.parametrize(
    "wrong", ["", " , ", "host:", ":9876", "host:port", "host:0", "host:70000"]
)
def test_illegal_nameservers(wrong):
    with pytest.raises(duemq.errors.InvalidArgument) as raised:
        aio.Producer(wrong)
    assert raised.value.field == "nameserver"


def test_nameservers():
    assert nameservers_of("a, b:1,") == ("a:9876", "b:1")
    assert nameservers_of(["[::1]", "[::1]:5"]) == ("[::1]:9876", "[::1]:5")


def test_names_are_loaded_when_they_are_used():
    code = (
        "import sys, duemq, duemq.errors\n"
        "from duemq.protocol import balance, due, route\n"
        "assert not {'grpc', 'google.protobuf', 'asyncio'} & set(sys.modules)\n"
        "duemq.Producer\n"
        "assert 'grpc' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=60)
