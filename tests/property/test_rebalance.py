"""How often queues move when members come and go one after the other: never more than they must."""

from collections import Counter
from itertools import pairwise
from random import Random
from zlib import crc32

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from duemq.protocol.balance import (
    AVERAGE,
    AVERAGE_BY_CIRCLE,
    CONSISTENT_HASH,
    STICKY,
    WITHOUT_MEMORY,
    MessageQueue,
    allocate,
    strategy_named,
)
from duemq_server.broker.groups.members import Hello
from duemq_server.broker.groups.subscriptions import TopicFilter
from tests.unit.broker.groups.stepping import Step, SteppingCoordinator

T0 = 1_700_000_000_000
TIMEOUT_MS = 10_000
STRATEGIES = [AVERAGE, AVERAGE_BY_CIRCLE, CONSISTENT_HASH, STICKY]
Target = dict[MessageQueue, str]
LOSSES = st.sampled_from(["", "restarts", "moves"])  # of the coordinator


class Group:
    """Members that follow the protocol; each release is heard when `settle` or `release` says."""

    def __init__(self, strategy: str, queue_count: int, seed: int = 0) -> None:
        self.strategy = strategy
        self.queues = [MessageQueue("t", f"b{n % 2}", n // 2) for n in range(queue_count)]
        self.now_ms = T0
        self.owned: dict[str, set[MessageQueue]] = {}
        self.moves: Counter[MessageQueue] = Counter()
        """How often each queue came to another member than it was with."""
        self.touched: set[MessageQueue] = set()
        """Queues that a member had to give up."""
        self._last: Target = {}
        self._gone: set[str] = set()
        self._told: dict[str, tuple[int, tuple[str, ...], set[MessageQueue]]] = {}
        self._incarnations: Counter[str] = Counter()
        self._random = Random(seed)
        self._coordinator = self._new_coordinator()

    def _new_coordinator(self) -> SteppingCoordinator:
        made = SteppingCoordinator("b0", session_timeout_ms=TIMEOUT_MS)
        made.routes_changed({"t": self.queues}, ["b0"], self.now_ms)
        return made

    def join(self, member: str, *, static: bool = False) -> None:
        """A new process, of a static member or of its own."""
        self._incarnations[member] += static
        self._gone.discard(member)
        self.owned[member] = set()
        self._told.pop(member, None)
        self._hello(member)

    def _hello(self, member: str) -> None:
        generation, members, _ = self._told.get(member, (0, (), set()))
        hello = Hello(
            "g",
            member,
            {"t": TopicFilter()},
            strategy=self.strategy,
            generation=generation,
            owned=tuple(sorted(self.owned[member])),
            members=members,
            incarnation=self._incarnations[member],
        )
        self._hear(self._coordinator.join(hello, self.now_ms))

    def leave(self, member: str) -> None:
        del self.owned[member]
        self._hear(self._coordinator.leave("g", member, self.now_ms))

    def go(self, member: str) -> None:
        """A static member's process ends: no word is said."""
        self.owned[member] = set()
        self._gone.add(member)

    def lose_coordinator(self, *, restarts: bool) -> None:
        """It is killed, and there again with what it saved; or another one takes over."""
        saved = self._coordinator.table.snapshot()
        self.now_ms += 1_000
        self._coordinator = self._new_coordinator()
        if restarts:
            self._coordinator.table.restore(saved, self.now_ms)
        members = list(self._told)
        self._random.shuffle(members)
        for member in members:
            if member in self.owned.keys() - self._gone:
                self._hello(member)

    def _hear(self, step: Step) -> None:
        for each in step.assignments:
            wanted = set(each.queues)
            self._told[each.member_id] = each.generation, each.members, wanted
            owned = self.owned[each.member_id]
            self.touched |= owned - wanted
            for queue in wanted - owned:
                assert not any(queue in others for others in self.owned.values())
                owned.add(queue)
                self.moves[queue] += self._last.get(queue, each.member_id) != each.member_id
                self._last[queue] = each.member_id

    def release(self) -> bool:
        """One member gives up one of the queues that it must; whether there was one."""
        going = [
            (member, queue)
            for member, (_, _, wanted) in sorted(self._told.items())
            for queue in sorted(self.owned.get(member, set()) - wanted)
        ]
        if not going:
            return False
        member, queue = self._random.choice(going)
        self.owned[member].remove(queue)
        generation = self._told[member][0]
        self._hear(self._coordinator.released("g", member, generation, [queue], self.now_ms))
        return True

    def settle(self) -> None:
        """Everything that must be given up is."""
        while self.release():
            pass
        assert sorted(queue for owned in self.owned.values() for queue in owned) == sorted(
            self.queues
        )

    @property
    def target(self) -> Target:
        return {queue: member for member, owned in self.owned.items() for queue in owned}


def started(strategy: str, queues: int, members: int, *, static: bool = False, seed: int = 0):
    group = Group(strategy, queues, seed)
    for number in range(members):
        group.join(f"host-{number}-a", static=static)
    group.settle()
    group.moves.clear()
    group.touched.clear()
    return group


def by_rule(strategy: str, queues: list[MessageQueue], members: list[str]) -> Target:
    """What a strategy answers that remembers nothing."""
    return allocate(strategy_named(strategy), queues, {each: ["t"] for each in members})


def rolled(members: int) -> list[list[str]]:
    """The members after each step of a rolling restart: one leaves, one comes in its place."""
    names = [f"host-{number}-a" for number in range(members)]
    steps = [list(names)]
    for number in range(members):
        steps.append(names[:number] + names[number + 1 :])
        names[number] = f"host-{number}-b"
        steps.append(list(names))
    return steps


def roll(group: Group, members: int, *, between=lambda: None) -> None:
    for number in range(members):
        group.leave(f"host-{number}-a")
        between()
        group.settle()
        group.join(f"host-{number}-b")
        between()
        group.settle()


@pytest.mark.parametrize("strategy", sorted(WITHOUT_MEMORY))
@given(st.integers(0, 24), st.integers(2, 6))
def test_a_rolling_restart_moves_what_the_strategy_says_and_no_more(strategy, queues, members):
    group = started(strategy, queues, members)
    roll(group, members)
    expected: Counter[MessageQueue] = Counter()
    targets = [by_rule(strategy, group.queues, names) for names in rolled(members)]
    for before, after in pairwise(targets):
        expected.update(queue for queue in group.queues if before[queue] != after[queue])
    assert +group.moves == expected


@given(st.integers(0, 24), st.integers(2, 6), st.integers(0, 9))
def test_a_rolling_restart_with_sticky_moves_only_the_shares_of_who_leaves_and_comes(
    queues, members, seed
):
    group = started(STICKY, queues, members, seed=seed)
    for number in range(members):
        left = set(group.owned[f"host-{number}-a"])
        group.moves.clear()
        group.touched.clear()
        group.leave(f"host-{number}-a")
        group.settle()
        assert +group.moves == Counter(left)
        assert not group.touched
        group.moves.clear()
        newcomer = f"host-{number}-b"
        group.join(newcomer)
        group.settle()
        assert +group.moves == Counter(group.owned[newcomer])
        assert len(group.owned[newcomer]) == queues // members


@pytest.mark.parametrize("strategy", STRATEGIES)
@given(
    st.integers(0, 24),
    st.integers(1, 6),
    st.lists(LOSSES, min_size=6, max_size=6),
)
# Members come to the third coordinator with generations far apart.
@example(4, 5, ["", "", "", "restarts", "moves", ""])
def test_a_rolling_restart_of_static_members_moves_and_touches_nothing(
    strategy, queues, members, coordinator
):
    group = started(strategy, queues, members, static=True)
    before = group.target
    for number in range(members):
        group.go(f"host-{number}-a")
        # One that takes over does not know what sticky gave to the process that is away.
        if (how := coordinator[number]) and (how, strategy) != ("moves", STICKY):
            group.lose_coordinator(restarts=how == "restarts")
        group.join(f"host-{number}-a", static=True)
        group.settle()
        assert group.target == before
    assert not +group.moves
    assert not group.touched


@pytest.mark.parametrize("strategy", sorted(WITHOUT_MEMORY))
@given(
    st.integers(0, 16),
    st.integers(2, 5),
    st.integers(0, 99),
    st.lists(LOSSES, min_size=10, max_size=10),
)
def test_a_coordinator_that_is_lost_moves_nothing(strategy, queues, members, seed, losses):
    """Compared with a rolling restart during which it is not."""
    undisturbed = started(strategy, queues, members, seed=seed)
    roll(undisturbed, members)
    group = started(strategy, queues, members, seed=seed)
    loss = iter(losses)

    def lose() -> None:
        group.release()
        if how := next(loss):
            group.lose_coordinator(restarts=how == "restarts")

    roll(group, members, between=lose)
    assert +group.moves == +undisturbed.moves


@given(st.integers(0, 16), st.integers(1, 5), st.integers(0, 99), LOSSES)
def test_a_coordinator_that_is_lost_while_a_member_joins_moves_what_it_must(
    queues, members, seed, how
):
    group = started(STICKY, queues, members, seed=seed)
    group.join("newcomer")
    for _ in range(seed % 3):
        group.release()
    if how:
        group.lose_coordinator(restarts=how == "restarts")
    group.settle()
    assert +group.moves == Counter(group.owned["newcomer"])
    assert len(group.owned["newcomer"]) == queues // (members + 1)


@pytest.mark.parametrize("strategy", sorted(WITHOUT_MEMORY))
@given(st.integers(1, 16), st.integers(0, 99), st.data())
def test_changes_one_upon_the_other_touch_no_queue_that_stays(strategy, queues, seed, data):
    """A member comes or goes while others have not given up yet what the last change took."""
    members = ["m0", "m1", "m2"]
    group = Group(strategy, queues, seed)
    for member in members:
        group.join(member)
    group.settle()
    group.moves.clear()
    group.touched.clear()
    targets = [by_rule(strategy, group.queues, members)]
    for number in range(data.draw(st.integers(1, 6))):
        if len(members) > 1 and data.draw(st.booleans()):
            gone = members.pop(data.draw(st.integers(0, len(members) - 1)))
            group.leave(gone)
        else:
            members.append(f"m{data.draw(st.integers(3, 9))}-{number}")
            group.join(members[-1])
        targets.append(by_rule(strategy, group.queues, sorted(members)))
        for _ in range(data.draw(st.integers(0, 3))):
            group.release()
    group.settle()
    assert group.target == targets[-1]
    for queue in group.queues:
        if len({target[queue] for target in targets}) == 1:
            assert queue not in group.touched
            assert not group.moves[queue]


# The table of broker/README.md, "Groups: members and their queues".
@pytest.mark.parametrize(
    ("strategy", "shares", "one_leaves", "one_comes", "restart", "of_one_queue"),
    [
        (AVERAGE, [12, 12, 12, 12], 16, 16, 160, 6),
        (AVERAGE_BY_CIRCLE, [12, 12, 12, 12], 36, 36, 288, 8),
        (CONSISTENT_HASH, [9, 10, 14, 15], 9, 18, 80, 3),
        (STICKY, [12, 12, 12, 12], 12, 12, 96, 2),
    ],
)
def test_moves_of_48_queues_among_4_members(
    strategy, shares, one_leaves, one_comes, restart, of_one_queue
):
    group = started(strategy, 48, 4)
    assert sorted(map(len, group.owned.values())) == shares
    group.leave("host-1-a")
    group.settle()
    assert group.moves.total() == one_leaves
    group.moves.clear()
    group.join("host-1-b")
    group.settle()
    assert group.moves.total() == one_comes
    group = started(strategy, 48, 4)
    roll(group, 4)
    assert (group.moves.total(), max(group.moves.values())) == (restart, of_one_queue)


# Pinned: what members are told does not depend on how the coordinator does its work.
@pytest.mark.parametrize(
    ("strategy", "digest"),
    [
        (AVERAGE, 3427956348),
        (AVERAGE_BY_CIRCLE, 1853701653),
        (CONSISTENT_HASH, 197635926),
        (STICKY, 2074146220),
    ],
)
def test_a_history_is_what_it_always_was(strategy, digest):
    group = Group(strategy, 300, seed=5)
    seen = 0

    def note() -> None:
        nonlocal seen
        for member, (_, members, wanted) in sorted(group._told.items()):
            seen = crc32(repr((member, members, sorted(wanted))).encode(), seen)

    for number in range(5):
        group.join(f"m{number}")
        note()
        for _ in range(20):
            group.release()
            note()
    group.settle()
    group.leave("m2")
    note()
    group.lose_coordinator(restarts=True)
    note()
    group.settle()
    group.join("m7")
    group.leave("m0")
    note()
    group.settle()
    note()
    assert seen == digest
