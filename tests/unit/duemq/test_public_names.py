"""The SDK's surface, pinned: a name that comes or goes is a decision."""

import inspect
import subprocess
import sys

import pytest

import duemq
from duemq import aio

NAMES = {
    "Admin",
    "CancelOutcome",
    "ClientSettings",
    "ConsumerSettings",
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
}
BOTH = ["Admin", "Producer", "PullConsumer", "PushConsumer"]


def public(kind):
    return {name for name in vars(kind) if not name.startswith("_")}


def test_names():
    assert set(duemq.__all__) == NAMES | {"aio", "errors"}
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
    assert public(blocking) == public(awaiting) - {"start"}
    for method in public(blocking):
        ours, theirs = getattr(blocking, method), getattr(awaiting, method)
        assert list(inspect.signature(ours).parameters.values()) == list(
            inspect.signature(theirs).parameters.values()
        )
        assert inspect.iscoroutinefunction(theirs)
        assert not inspect.iscoroutinefunction(ours)


@pytest.mark.parametrize("name", sorted(NAMES))
def test_everything_public_is_documented(name):
    kind = getattr(duemq, name)
    assert inspect.getdoc(kind)
    for method in public(kind):
        if callable(getattr(kind, method)):
            assert inspect.getdoc(getattr(kind, method)), f"{name}.{method}"


def test_names_are_loaded_when_they_are_used():
    code = (
        "import sys, duemq, duemq.errors, duemq.balance, duemq.route, duemq.due\n"
        "assert not {'grpc', 'google.protobuf', 'asyncio'} & set(sys.modules)\n"
        "duemq.Producer\n"
        "assert 'grpc' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=60)
