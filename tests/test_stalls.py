"""What `make stalls` does to a test."""

import asyncio

import pytest

from tests import stalls


class Item:
    """A test, as pytest hands it to a plugin."""

    def __init__(self) -> None:
        self.nodeid = "tests/service/test_it.py::test_it"
        self.sections: list[str] = []

    def add_report_section(self, when: str, key: str, content: str) -> None:
        self.sections.append(f"{when} {key}: {content}")


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    slept: list[float] = []
    monkeypatch.setattr(stalls, "sleep", slept.append)
    # Put back behind the test, as nobody else takes the patch away.
    monkeypatch.setattr(asyncio.BaseEventLoop, "_run_once", asyncio.BaseEventLoop._run_once)
    return slept


def run(item: Item, turns: int) -> None:
    async def taken() -> None:
        for _ in range(turns):
            await asyncio.sleep(0)

    plugin = stalls.Stalls()
    plugin.patch()
    call = plugin.pytest_runtest_call(item)
    next(call)
    asyncio.run(taken())
    with pytest.raises(StopIteration):
        next(call)
    asyncio.run(taken())  # a fixture's end


def test_a_loop_stands_still_once_and_the_report_says_how_to_repeat_it(slept) -> None:
    item = Item()
    run(item, turns=stalls.TURNS_MAX)
    assert slept == [stalls.STALL_S]
    [section] = item.sections
    assert section.startswith("call stall: stood still for ")
    assert section.endswith(f", STALL_SEED={stalls.SEED}")


def test_a_test_that_ends_before_is_not_said_to_have_stood_still(
    slept, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stalls, "TURNS_MIN", stalls.TURNS_MAX)
    item = Item()
    run(item, turns=0)
    assert (slept, item.sections) == ([], [])
