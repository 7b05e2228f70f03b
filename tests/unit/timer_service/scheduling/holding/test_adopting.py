"""A new shard holds what others hold, while people hold and resume."""

import pytest

from duemq_server.timer_service.scheduling.holding import changes
from duemq_server.timer_service.scheduling.holding.adopting import Adopting, Name
from duemq_server.timer_service.timers.hold_entry import NEWEST
from tests.property.timer_world import World

A, B = ("a", ""), ("b", "k-")


class NewShard:
    """It reads, and does what that says when it comes to it."""

    def __init__(self) -> None:
        self.world = World()
        self.adopting = Adopting()
        self.world.scheduler.holds.adoptions.add(self.adopting)

    def ask(self, name: Name, *, held: bool) -> None:
        """As `duemq timer hold` and `resume` do."""
        (changes.hold if held else changes.resume)(self.world.scheduler, 0, *name)

    def reads(self, *theirs: Name, meanwhile: tuple[Name, bool] | None = None) -> bool:
        """Whether that brought anything new; `meanwhile`: asked before it is acted on."""
        step = self.adopting.read(set(theirs))
        if meanwhile is not None:
            self.ask(meanwhile[0], held=meanwhile[1])
        for held, names in ((True, step.hold), (False, step.resume)):
            for name in names:
                changes.adopt(self.world.scheduler, 0, *name, self.adopting, held=held)
        return bool(step.hold or step.resume)

    @property
    def held(self) -> set[Name]:
        return {(each.topic, each.prefix) for each in self.world.scheduler.holds}


@pytest.fixture
def new() -> NewShard:
    return NewShard()


def test_it_reads_until_nothing_is_new(new: NewShard) -> None:
    assert new.reads(A)
    assert new.reads(A, B)
    assert not new.reads(A, B)
    assert new.held == {A, B}
    assert not NewShard().reads()


def test_what_is_resumed_here_while_it_reads_does_not_come_back(new: NewShard) -> None:
    """The others have not been asked yet, or their answer was on its way."""
    new.reads(A, B, meanwhile=(A, False))
    assert new.held == {B}
    assert not new.reads(A, B)
    assert new.held == {B}


def test_what_is_resumed_with_a_policy_does_not_come_back(new: NewShard) -> None:
    step = new.adopting.read({A})
    assert not changes.resume_some(new.world.scheduler, 0, *A, NEWEST, 0)
    [name] = step.hold
    assert not changes.adopt(new.world.scheduler, 0, *name, new.adopting, held=True)
    assert new.held == set()


def test_what_only_others_were_asked_to_resume_is_resumed_here_too(new: NewShard) -> None:
    """Who asked did not know of this shard yet."""
    new.reads(A, B)
    assert new.reads(B)
    assert new.held == {B}
    assert not new.reads(B)


@pytest.mark.parametrize("before", [True, False])
def test_what_is_held_here_stays_whatever_others_say(new: NewShard, before: bool) -> None:
    if before:
        new.reads(A)
    new.ask(A, held=True)
    new.reads()
    assert new.held == {A}
    new.reads(A, meanwhile=(A, True))
    new.reads()
    assert new.held == {A}


def test_afterwards_nothing_is_remembered(new: NewShard) -> None:
    new.reads(A)
    new.world.scheduler.holds.adoptions.discard(new.adopting)
    new.ask(A, held=False)
    assert new.adopting.may_change(A)
    assert new.held == set()
