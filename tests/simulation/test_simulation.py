"""Replicas under everything that may happen to them: safe after every step, and well again after.

`make simulate SEEDS=… FIRST=…` takes more histories; a failure names its seed:
World(seed).run(STEPS) repeats it.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.simulation.mutations import MUTATIONS, MUTATIONS_OF_TIME
from tests.simulation.node import Violation
from tests.simulation.timed import TimedWorld
from tests.simulation.world import FULL_LOGS, OTHER_MEMBERS, SLOW_STORE, Mood, World

STEPS = 1_000
SEEDS = int(os.environ.get("SIMULATION_SEEDS", "1000"))
FIRST = int(os.environ.get("SIMULATION_FIRST", "0"))
SEEDS_A_TEST = 50
TICKS = 1_000
TIMED_SEEDS = max(1, SEEDS // 20)
# Most are found in one of ten histories.
SEEDS_OF_A_MUTATION = 400
MOOD_OF = {
    "settle-by-read": SLOW_STORE,
    "count-old-set": SLOW_STORE,
    "keep-strangers": OTHER_MEMBERS,
    "keep-what-was-refused": FULL_LOGS,
    "forget-before-truncating": FULL_LOGS,
}


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Logs of cut tails, thousands of them."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def lived(seed: int, mood: Mood | None = None) -> World:
    world = World(seed, mood)
    try:
        world.run(STEPS)
        world.heal()
    except Violation as violation:
        raise AssertionError(f"seed {seed}: {violation}") from violation
    return world


@pytest.mark.parametrize("first", range(FIRST, FIRST + SEEDS, SEEDS_A_TEST))
def test_a_history_is_safe_and_ends_well(first: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(first, min(first + SEEDS_A_TEST, FIRST + SEEDS)):
        world = lived(seed)
        seen.update(world.counts)
        seen["lost answers"] += world.store.lost_answers
        for node in world.nodes.values():
            seen["takeovers"] += node.takeovers
            seen["truncations"] += node.truncated
            seen["caught up"] += node.caught_up
            seen["refused"] += node.refused
    if first + SEEDS_A_TEST <= FIRST + SEEDS:
        rare = ("truncations", "caught up", "disks", "left_down", "members", "refused")
        assert all(seen[each] for each in rare), seen
        assert all(seen[each] > 10 for each in ("commits", "takeovers", "lost answers")), seen


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mutation_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    MUTATIONS[name](monkeypatch)
    for seed in range(SEEDS_OF_A_MUTATION):
        world = World(seed, MOOD_OF.get(name))
        try:
            world.run(STEPS)
            world.heal()
        except (Violation, ValueError):  # ValueError: a log that is to be cut within an entry
            return
    pytest.fail(f"{SEEDS_OF_A_MUTATION} histories did not find {MUTATIONS[name].__doc__}")


@pytest.mark.long
def test_a_history_by_the_clock_is_read_from_who_leads() -> None:
    seen: Counter[str] = Counter()
    for seed in range(FIRST, FIRST + TIMED_SEEDS):
        world = TimedWorld(seed)
        try:
            world.run(TICKS)
            world.heal()
        except Violation as violation:
            raise AssertionError(f"seed {seed}: {violation}") from violation
        seen.update(world.counts)
        seen["takeovers"] += sum(node.takeovers for node in world.nodes.values())
    if TIMED_SEEDS >= 50:
        assert seen["served"] > 10_000, seen
        assert seen["takeovers"] > 100, seen
        assert seen["hand-overs"] > 20, seen


@pytest.mark.long
@pytest.mark.parametrize("name", MUTATIONS_OF_TIME)
def test_a_mutation_of_time_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    MUTATIONS_OF_TIME[name](monkeypatch)
    for seed in range(SEEDS_OF_A_MUTATION):
        try:
            TimedWorld(seed).run(TICKS)
        except Violation:
            return
    pytest.fail(f"{SEEDS_OF_A_MUTATION} histories did not find {name}")
