"""What a recording member does before it records anything."""

import threading
from collections.abc import Callable

import pytest

from duemq.errors import Timeout, Unavailable
from tests.cluster.recording_member import STARTS_MAX, started


class Consumer:
    """Its start fails as told."""

    def __init__(self, error: Exception | None) -> None:
        self._error = error

    def start(self) -> None:
        if self._error is not None:
            raise self._error


def consumers(*errors: Exception | None) -> tuple[Callable[[], Consumer], list[Consumer]]:
    made: list[Consumer] = []

    def make() -> Consumer:
        made.append(Consumer(errors[len(made)]))
        return made[-1]

    return make, made


def test_who_cannot_join_as_the_brokers_are_away_starts_anew():
    make, made = consumers(Unavailable("no nameserver"), Timeout("no heartbeat"), None)
    assert started(make, threading.Event()) is made[2]


def test_who_is_to_end_before_it_has_joined_ends():
    stop = threading.Event()
    stop.set()
    make, made = consumers(Timeout("no heartbeat"))
    assert started(make, stop) is None
    assert len(made) == 1


def test_who_can_never_join_says_so():
    make, made = consumers(*(Timeout("no heartbeat") for _ in range(STARTS_MAX)))
    with pytest.raises(Timeout):
        started(make, threading.Event())
    assert len(made) == STARTS_MAX


def test_who_is_refused_does_not_try_again():
    make, made = consumers(ValueError("filters"))
    with pytest.raises(ValueError, match="filters"):
        started(make, threading.Event())
    assert len(made) == 1
