import pickle

import pytest

from duemq import errors
from duemq.errors import DuemqError, ErrorCode
from duemq.v1 import error_pb2


def classes(base=DuemqError):
    for kind in base.__subclasses__():
        yield kind
        yield from classes(kind)


def test_codes_are_those_of_the_wire():
    assert {code.name: code.value for code in ErrorCode} == dict(error_pb2.ErrorCode.items())


def test_every_class_is_public_and_drawn_in_the_tree():
    for kind in classes():
        if kind.__module__ == "duemq.errors":
            assert kind.__name__ in errors.__all__
            assert f"── {kind.__name__}" in errors.__doc__


def test_an_error_says_what_was_wrong():
    error = errors.TooLarge("body has 9 bytes, at most 8", field="body", value=9, limit=8)
    assert str(error) == "body has 9 bytes, at most 8"
    assert (error.field, error.value, error.limit) == ("body", "9", "8")


@pytest.mark.parametrize("kind", [errors.Unavailable, errors.NotReady, errors.ReadOnly])
def test_unavailable_is_retryable_unless_said_otherwise(kind):
    assert kind("m").retryable
    assert not kind("m", retryable=False).retryable


def test_rejected_is_not_retryable():
    assert not any(kind("m").retryable for kind in classes(errors.Rejected))


def test_errors_can_be_pickled_with_all_they_say():
    error = errors.Unavailable("m", field="f", value="v", limit="l", retryable=False)
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is errors.Unavailable
    assert vars(copy) == vars(error)
