"""A coordinator that rebalances after each event at once, as its caller does after several."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from duemq.protocol.balance import MessageQueue
from duemq.protocol.pieces import finish
from duemq_server.broker.groups.coordinator import Assignment, Coordinator, Moved, TurnedOut
from duemq_server.broker.groups.members import Hello


@dataclass(slots=True)
class Step:
    """What the members are to be told, in this order."""

    turned_out: list[TurnedOut] = field(default_factory=list)
    moved: list[Moved] = field(default_factory=list)
    assignments: list[Assignment] = field(default_factory=list)


class SteppingCoordinator(Coordinator):
    """See the module."""

    def join(
        self,
        hello: Hello,
        now_ms: int,
        known_generation: int = 0,
        *,
        replaces_connected: bool = False,
    ) -> Step:
        """As `enter`; the member is always told its assignment."""
        turned_out = self.enter(
            hello, now_ms, known_generation, replaces_connected=replaces_connected
        )
        return Step(turned_out, assignments=self._rebalance(now_ms))

    def released(
        self,
        group_name: str,
        member_id: str,
        generation: int,
        queues: Iterable[MessageQueue],
        now_ms: int,
    ) -> Step:
        """As `let_go`."""
        self.let_go(group_name, member_id, generation, queues, now_ms)
        return Step(assignments=self._rebalance(now_ms))

    def leaving(self, group_name: str, member_id: str, now_ms: int) -> Step:
        """As `retire`."""
        self.retire(group_name, member_id, now_ms)
        return Step(assignments=self._rebalance(now_ms))

    def leave(self, group_name: str, member_id: str, now_ms: int) -> Step:
        """As `quit`."""
        self.quit(group_name, member_id, now_ms)
        return Step(assignments=self._rebalance(now_ms))

    def replaced_is_gone(
        self, group_name: str, member_id: str, incarnation: int, now_ms: int
    ) -> Step:
        """As `gone`."""
        self.gone(group_name, member_id, incarnation)
        return Step(assignments=self._rebalance(now_ms))

    def routes_changed(
        self, queues: Mapping[str, Iterable[MessageQueue]], brokers: Iterable[str], now_ms: int
    ) -> Step:
        """As `set_routes`."""
        moved = self.set_routes(queues, brokers, now_ms)
        return Step(moved=moved, assignments=self._rebalance(now_ms))

    def tick(self, now_ms: int) -> Step:
        """As `expire`."""
        self.expire(now_ms)
        return Step(assignments=self._rebalance(now_ms))

    def _rebalance(self, now_ms: int) -> list[Assignment]:
        told: list[Assignment] = []
        while (name := self.touched()) is not None:
            told += finish(self.rebalancing(name, now_ms))
        return told
