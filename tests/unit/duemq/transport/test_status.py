import asyncio

import grpc
import pytest

from duemq import errors
from duemq.transport import status
from duemq.v1 import error_pb2


def classes(base=errors.DuemqError):
    for kind in base.__subclasses__():
        if kind.__module__ == "duemq.errors":
            yield kind
            yield from classes(kind)


class FailedCall(grpc.RpcError):
    def __init__(self, code, details="said", trailer=()):
        self.status, self.text, self.trailer = code, details, trailer

    def code(self):
        return self.status

    def details(self):
        return self.text

    def trailing_metadata(self):
        return self.trailer


def test_every_class_with_a_code_of_its_own_has_a_row():
    own = {kind for kind in classes() if "code" in vars(kind)}
    assert own == set(status.STATUSES)


def test_every_code_has_one_class():
    codes = [kind.code for kind in status.STATUSES]
    assert len(set(codes)) == len(codes)
    assert set(codes) == set(errors.ErrorCode) - {errors.ErrorCode.ERROR_CODE_UNSPECIFIED}


def test_every_status_without_a_trailer_becomes_an_error():
    for code in grpc.StatusCode:
        if code is not grpc.StatusCode.OK:
            assert isinstance(status.from_rpc_error(FailedCall(code)), errors.DuemqError)


@pytest.mark.parametrize("kind", status.STATUSES, ids=lambda kind: kind.__name__)
def test_an_error_survives_the_wire(kind):
    error = kind("message", field="f", value="v", limit="l", retryable=True)
    failed = FailedCall(status.status_of(error), "message", status.trailer(error))
    back = status.from_rpc_error(failed)
    assert type(back) is kind
    assert vars(back) == vars(error)


def test_a_class_without_a_row_travels_as_its_base():
    assert status.status_of(errors.InvariantError("m")) is grpc.StatusCode.INTERNAL
    assert status.to_proto(errors.InvariantError("m")).code == error_pb2.INTERNAL
    assert status.to_proto(errors.Closed("m")).code == error_pb2.INTERNAL


def test_a_code_of_a_newer_server_is_internal():
    assert type(status.from_proto(error_pb2.Error(code=9999))) is errors.Internal


def test_a_broken_trailer_falls_back_to_the_status():
    failed = FailedCall(grpc.StatusCode.UNAVAILABLE, trailer=((status.TRAILER, b"\xff"),))
    assert type(status.from_rpc_error(failed)) is errors.Unavailable


def test_the_peer_is_named():
    failed = FailedCall(grpc.StatusCode.UNAVAILABLE, "connection refused")
    assert str(status.from_rpc_error(failed, "b:1")) == "b:1: connection refused (UNAVAILABLE)"


def test_a_call_that_an_older_server_does_not_know_says_so():
    failed = FailedCall(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
    error = status.from_rpc_error(failed, "t:1")
    assert not error.retryable
    assert "t:1: it does not know this call; is it an older version?" in str(error)


def test_a_message_above_grpcs_own_limit_is_too_large():
    text = "CLIENT: Received message larger than max (17 vs. 16)"
    failed = FailedCall(grpc.StatusCode.RESOURCE_EXHAUSTED, text)
    assert type(status.from_rpc_error(failed)) is errors.TooLarge


def test_long_texts_are_cut_to_fit_in_headers():
    sent = status.to_proto(errors.InvalidArgument("m" * 9999, value="v" * 9999))
    assert len(sent.message) == len(sent.value) == status.TEXT_CHARS_MAX
    assert sent.message.endswith("…")


class Call:
    """A call that is never answered."""

    def __init__(self):
        self.begun = asyncio.Event()
        self.result = asyncio.get_running_loop().create_future()

    def __await__(self):
        self.begun.set()
        return self.result.__await__()


async def test_a_call_whose_channel_was_closed_is_unavailable():
    call = Call()
    answer = asyncio.create_task(status.answer(call, "b:1"))
    await call.begun.wait()
    call.result.cancel()
    with pytest.raises(errors.Unavailable, match="b:1: the call was given up") as raised:
        await answer
    assert raised.value.retryable


async def test_whoever_gives_up_its_own_call_is_cancelled():
    call = Call()
    answer = asyncio.create_task(status.answer(call, "b:1"))
    await call.begun.wait()
    answer.cancel()
    with pytest.raises(asyncio.CancelledError):
        await answer
    assert answer.cancelled()
    assert call.result.cancelled()
