"""Which timers are kept back: those of whole topics, and of keys that begin so.

Owned by: Scheduler.  Mutated by: the thread that owns the scheduler, by `apply` only, so that it is
a function of checkpoint and log.  No clock, no I/O.

While a topic is held its due timers wait in the dispatcher, as if nobody served the topic.  A timer
whose key is held is told from others by its record, as a batch is cut: it waits under a target of
the hold's own (`waiting_room`), and is parked and loaded under that, until the hold is gone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from duemq_server.timer_service.scheduling.holding.adopting import Adopting
from duemq_server.timer_service.timers.hold_entry import HELD, RESUMING, Hold, HoldChange
from duemq_server.timer_service.timers.log_entries import TargetId

HOLDS_MAX = 1_000
"""Of a shard at once."""
_FIRST_ROOM = -2  # queues from here down are no queues


def waiting_room(hold: Hold) -> TargetId:
    """The target under which a hold's timers wait; nothing is sent there."""
    return TargetId("", hold.topic, _FIRST_ROOM - hold.number)


def room_number(target: TargetId) -> int | None:
    """The number of the hold whose timers wait there; None: it is a real target."""
    return _FIRST_ROOM - target.queue_id if target.queue_id <= _FIRST_ROOM else None


class Holds:
    """See the module."""

    def __init__(self) -> None:
        self.topics: set[str] = set()
        """Held as a whole."""
        self.by_key: dict[str, dict[str, Hold]] = {}
        """Those by prefix, by topic: empty as long as there is none."""
        self.next_number = 1
        self.adoptions: set[Adopting] = set()
        """Those under way, of a shard that is new."""
        self.left: bool | None = None
        """This shard had left, and has not learnt yet what others hold since; None: the log does
        not say, for it never left, or did so by an older release."""
        self._by_name: dict[tuple[str, str], Hold] = {}
        self._numbers: set[int] = set()
        self._prefixes: dict[str, tuple[str, ...]] = {}

    def __len__(self) -> int:
        return len(self._by_name)

    def __iter__(self) -> Iterator[Hold]:
        return iter(self._by_name.values())

    def get(self, topic: str, prefix: str) -> Hold | None:
        """The hold of just that."""
        return self._by_name.get((topic, prefix))

    def resuming(self, but: Collection[int] = ()) -> Hold | None:
        """One that ends once some of its timers are dropped; `but`: none of these numbers."""
        return next((each for each in self if each.policy and each.number not in but), None)

    def holds_room(self, target: TargetId) -> bool:
        """Whether what waits there is still held; it is a hold's."""
        return room_number(target) in self._numbers

    def of_key(self, topic: str, key: str) -> Hold | None:
        """The hold that keeps a key's timer back, but for its topic's; the oldest of several."""
        if not key.startswith(self._prefixes.get(topic, ())):
            return None
        holds = self.by_key[topic].values()
        return next(each for each in holds if key.startswith(each.prefix))

    def within(self, hold: Hold) -> tuple[str, ...]:
        """Prefixes of holds that are about some of its keys only."""
        longer = (each for each in self.by_key.get(hold.topic, ()) if each != hold.prefix)
        return tuple(each for each in longer if each.startswith(hold.prefix))

    def covers(self, topic: str, key: str) -> bool:
        """Whether such a timer is kept back once it is due."""
        return topic in self.topics or self.of_key(topic, key) is not None

    def asked(self, topic: str, prefix: str) -> None:
        """Somebody holds it, or resumes it, here."""
        for each in self.adoptions:
            each.asked((topic, prefix))

    def apply(self, change: HoldChange) -> None:
        """As an entry of the log says."""
        hold = change.hold
        name = hold.topic, hold.prefix
        self.next_number = max(self.next_number, hold.number + 1)
        if change.what == RESUMING:
            self._by_name[name] = hold._replace(since_ms=self._by_name[name].since_ms)
        elif change.what == HELD:
            self._by_name[name] = hold
            self._numbers.add(hold.number)
            if hold.prefix:
                self.by_key.setdefault(hold.topic, {})[hold.prefix] = hold
            else:
                self.topics.add(hold.topic)
        else:
            self._numbers.discard(self._by_name.pop(name).number)
            if hold.prefix:
                del self.by_key[hold.topic][hold.prefix]
                if not self.by_key[hold.topic]:
                    del self.by_key[hold.topic]
            else:
                self.topics.discard(hold.topic)
        self._prefixes = {topic: tuple(holds) for topic, holds in self.by_key.items()}

    def saved(self) -> list[Hold]:
        """For a checkpoint."""
        return list(self)

    def restore(self, saved: Iterable[Hold], next_number: int) -> None:
        """Takes over what a checkpoint has."""
        for hold in saved:
            self.apply(HoldChange(HELD, hold))
        self.next_number = max(self.next_number, next_number)
