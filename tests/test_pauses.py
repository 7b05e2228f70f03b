"""What `make pauses` does to a test."""

import sys
import threading
from collections.abc import Iterator

import pytest

from tests import pauses
from tests.test_stalls import Item


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, float]]]:
    """Who stood still, and for how long."""
    slept: list[tuple[str, float]] = []

    def sleep(seconds: float) -> None:
        slept.append((threading.current_thread().name, seconds))

    monkeypatch.setattr(pauses, "sleep", sleep)
    before = sys.getprofile(), threading.getprofile()
    yield slept
    sys.setprofile(before[0])
    threading.setprofile(before[1])


def count(calls: int) -> None:
    def called() -> None:
        pass

    for _ in range(calls):
        called()


def run(item: Item, calls: int) -> None:
    """A test that makes calls, and so does a thread of its own."""
    plugin = pauses.Pauses()
    threading.setprofile(plugin.begin)
    call = plugin.pytest_runtest_call(item)
    next(call)
    thread = threading.Thread(target=count, args=(calls,), name="other")
    thread.start()
    count(calls)
    thread.join()
    with pytest.raises(StopIteration):
        next(call)
    count(calls)  # a fixture's end


def test_each_thread_stands_still_now_and_then_and_the_report_says_how_to_repeat_it(slept) -> None:
    item = Item()
    run(item, calls=100 * pauses.CALLS)
    names = [name for name, _ in slept]
    for name in (threading.current_thread().name, "other"):
        assert 70 <= names.count(name) <= 140
    assert all(0 <= seconds <= pauses.PAUSE_S for _, seconds in slept)
    (section,) = item.sections
    assert section == f"call pauses: {len(slept)}, PAUSE_SEED={pauses.SEED}"


def test_a_test_without_calls_is_not_said_to_have_stood_still(
    slept, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pauses, "CALLS", 1_000_000)
    item = Item()
    run(item, calls=0)
    assert (slept, item.sections) == ([], [])
