"""What a benchmark leaves at a cluster that is not its own: nothing, unless it is told to."""

from pathlib import Path

import pytest

from duemq.descriptions import TimerCount, TimerOwner
from duemq.errors import (
    DuemqError,
    GroupNotFound,
    InvalidArgument,
    PartialAnswer,
    TopicNotFound,
    Unavailable,
)
from duemq_server.bench.harness import target as module
from duemq_server.bench.harness.target import target

AWAY = PartialAnswer("no answer of timer shard 0", partial=[TimerCount("a")])


class Elsewhere:
    """Somebody's cluster, with a topic and delayed messages of theirs."""

    def __init__(self) -> None:
        self.topics = {"theirs"}
        self.groups = {"theirs"}
        self.pending = {"theirs": 5}
        self.away = False
        self.owner = 0  # of the queues of delayed messages; 0: there is no timer service
        self.takes_over = True
        self.cancelled = 0
        self.waiting = 0  # delayed messages that no timer shard has taken over
        self.uncounted: DuemqError | None = None
        self.refuses: str | None = None

    def __call__(self, nameserver: str) -> "Elsewhere":
        assert nameserver == "ns:1"
        if self.away:
            raise Unavailable("nobody is there")
        return self

    def __enter__(self) -> "Elsewhere":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def create_topic(self, name: str, *, queues: int) -> None:
        self.topics.add(name)

    def count_timers(self, topic: str) -> list[TimerCount]:
        if self.uncounted is not None:
            raise self.uncounted
        pending = self.pending.get(topic, 0)
        return [TimerCount(topic, pending=pending, accepted=pending)]

    def timer_owners(self) -> list[TimerOwner]:
        taken_over = 9 - self.waiting
        owner = TimerOwner(
            "b0", 0, self.owner, "t0", 0, 1, taken_over=taken_over, waiting=self.waiting
        )
        if self.waiting and self.takes_over:
            self.waiting -= 1
            self.pending[next(reversed(self.pending))] += 1
        return [owner]

    def cancel_pending(self, topic: str) -> None:
        self.cancelled += self.pending.get(topic, 0)
        self.pending.pop(topic, None)

    def delete_topic(self, name: str) -> None:
        if name == self.refuses:
            raise Unavailable("its broker is away")
        if name not in self.topics:
            raise TopicNotFound(f"no topic {name!r}")
        self.topics.remove(name)

    def delete_group(self, name: str) -> None:
        if name not in self.groups:
            raise GroupNotFound(f"no group {name!r}")
        self.groups.remove(name)


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> Elsewhere:
    there = Elsewhere()
    monkeypatch.setattr(module, "Admin", there)
    return there


@pytest.mark.parametrize("ends", [None, KeyboardInterrupt, Unavailable("it failed")])
def test_its_topics_go_and_all_others_stay(
    elsewhere: Elsewhere, ends: BaseException | type[BaseException] | None, tmp_path: Path
) -> None:
    said: list[str] = []

    def measure() -> None:
        with target("ns:1", directory=str(tmp_path), tell_left=said.append) as measured:
            topic = measured.new_topic("a")
            assert topic in elsewhere.topics
            elsewhere.groups.add(f"{topic}-group")
            elsewhere.pending[topic] = 3
            elsewhere.topics.remove(measured.new_topic("gone"))
            if ends is not None:
                raise ends

    if ends is None:
        measure()
    else:
        with pytest.raises(type(ends) if isinstance(ends, Exception) else KeyboardInterrupt):
            measure()
    assert elsewhere.topics == elsewhere.groups == {"theirs"}
    assert elsewhere.pending == {"theirs": 5}
    assert said == []


def test_there_may_be_no_timer_service(elsewhere: Elsewhere) -> None:
    elsewhere.uncounted = AWAY
    with target("ns:1") as measured:
        measured.new_topic("a")
    assert elsewhere.topics == {"theirs"}


def test_what_a_timer_shard_that_is_away_may_have_keeps_its_topic(elsewhere: Elsewhere) -> None:
    said: list[str] = []
    with target("ns:1", tell_left=said.append) as measured:
        topic = measured.new_topic("a")
        elsewhere.owner, elsewhere.uncounted = 7, AWAY
    assert topic in elsewhere.topics
    assert said == [f"topic {topic} or its group is left: {AWAY}"]


@pytest.mark.parametrize("in_time", [True, False])
@pytest.mark.parametrize("accepted", [0, 1])
def test_what_no_timer_shard_has_taken_over_yet_is_waited_for(
    elsewhere: Elsewhere, monkeypatch: pytest.MonkeyPatch, accepted: int, in_time: bool
) -> None:
    """They cancel what they have, and the rest would wait for the topic for ever."""
    monkeypatch.setattr(module, "POLL_S", 0.0)
    monkeypatch.setattr(module, "TAKEN_OVER_S", 60 if in_time else 0)
    said: list[str] = []
    with target("ns:1", tell_left=said.append) as measured:
        elsewhere.pending[topic := measured.new_topic("a")] = accepted
        elsewhere.owner, elsewhere.waiting, elsewhere.takes_over = 7, 5 - accepted, in_time
    assert (elsewhere.cancelled, topic in elsewhere.topics) == (
        (5, False) if in_time else (0, True)
    )
    assert [topic in each for each in said] == [True] * (not in_time)


def test_what_is_counted_with_other_topics_goes_uncounted(elsewhere: Elsewhere) -> None:
    said: list[str] = []
    with target("ns:1", tell_left=said.append) as measured:
        elsewhere.pending[measured.new_topic("a")] = 3
        elsewhere.uncounted = InvalidArgument("this shard has had more than 4096 topics")
    assert elsewhere.topics == {"theirs"}
    assert elsewhere.pending == {"theirs": 5}
    assert said == []


def test_they_are_kept_where_that_is_asked_for(elsewhere: Elsewhere) -> None:
    with target("ns:1", keep_topics=True) as measured:
        topic = measured.new_topic("a")
    assert elsewhere.topics == {"theirs", topic}


def test_what_is_left_is_told_and_the_rest_goes(elsewhere: Elsewhere) -> None:
    said: list[str] = []
    with target("ns:1", tell_left=said.append) as measured:
        elsewhere.refuses = stays = measured.new_topic("a")
        measured.new_topic("b")
    assert elsewhere.topics == {"theirs", stays}
    assert said == [f"topic {stays} or its group is left: its broker is away"]


def test_a_cluster_that_is_gone_is_told(elsewhere: Elsewhere) -> None:
    said: list[str] = []
    with target("ns:1", tell_left=said.append) as measured:
        topics = [measured.new_topic(name) for name in ("a", "b")]
        elsewhere.away = True
    assert said == [f"topic {each} or its group is left: nobody is there" for each in topics]


def test_a_second_ctrl_c_is_told_what_stays(
    elsewhere: Elsewhere, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []

    def interrupted(name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(elsewhere, "delete_topic", interrupted)
    with pytest.raises(KeyboardInterrupt), target("ns:1", tell_left=said.append) as measured:
        topic = measured.new_topic("a")
    assert said == [f"topic {topic} or its group is left: interrupted"]
