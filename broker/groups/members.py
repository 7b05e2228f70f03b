"""What a coordinator knows of a group and its members.  Pure."""

from collections import defaultdict
from collections.abc import Iterable, Set
from dataclasses import dataclass, field
from typing import NamedTuple

from duemq.errors import InvalidArgument
from duemq.protocol import checks
from duemq.protocol.balance import AVERAGE, WITHOUT_MEMORY, MessageQueue, strategy_named
from duemq.protocol.limits import SESSION_TIMEOUT_MS_MAX, SESSION_TIMEOUT_MS_MIN
from duemq.protocol.names import check_own_group
from duemq.protocol.pieces import Pieces, parts
from duemq_server.broker.groups import subscriptions
from duemq_server.broker.groups.subscriptions import Subscriptions
from duemq_server.broker.store.offsets import check_generation

MEMBERS_MAX = 1_000  # a group
MEMBER_ID_LENGTH_MAX = 255
CLIENT_LENGTH_MAX = 1_024
OWNED_MAX = 65_536  # queues in a hello
NAMED_MAX = 16_384  # members in a hello: those present, and awaited since some restarts
SESSION_TIMEOUT_MS_DEFAULT = 10_000


@dataclass(frozen=True, slots=True)
class Hello:
    """What a member says when it comes, or comes back."""

    group: str
    member_id: str
    subscriptions: Subscriptions
    session_timeout_ms: int = 0  # 0: the default
    strategy: str = AVERAGE
    generation: int = 0  # of the last assignment it saw
    owned: tuple[MessageQueue, ...] = ()
    client: str = ""
    members: tuple[str, ...] = ()  # as that assignment named them
    incarnation: int = 0  # of a static member
    leaving: bool = False

    def check(self) -> None:
        """Raises InvalidArgument for what no member may say."""
        check_own_group(self.group)
        checks.length("member_id", self.member_id, 1, MEMBER_ID_LENGTH_MAX)
        checks.length("client", self.client, 0, CLIENT_LENGTH_MAX)
        check_owned("owned", len(self.owned))
        longest = max(map(len, self.members), default=0)
        checks.count("members", longest, 0, MEMBER_ID_LENGTH_MAX, "characters in a name")
        checks.count("members", len(self.members), 0, NAMED_MAX, "names")
        subscriptions.check(self.subscriptions)
        checks.between(
            "session_timeout_ms",
            self.session_timeout_ms,
            SESSION_TIMEOUT_MS_MIN,
            SESSION_TIMEOUT_MS_MAX,
            zero="the broker's own",
        )
        check_generation(self.generation)
        strategy_named(self.strategy)


@dataclass(slots=True)
class Member:
    """A member with a session."""

    member_id: str
    subscriptions: Subscriptions
    strategy: str
    session_timeout_ms: int
    client: str
    last_heard_ms: int
    incarnation: int
    was_member: bool  # before it came here
    leaving: bool = False  # has no share any more, and may still hold queues
    # Queues and members of the last assignment.
    told: tuple[tuple[MessageQueue, ...], tuple[str, ...]] | None = None


@dataclass(slots=True)
class Holding:
    """Who has a queue, and the generation of the last assignment that said so."""

    member_id: str
    granted: int
    claimed: int = 0  # while holding back: the generation by which the member says so


class Replaced(NamedTuple):
    """A static member's process that a newer one has replaced, and that may not know it yet."""

    member_id: str
    incarnation: int
    until_ms: int
    """Its session is over then, and its member's lease before that."""


@dataclass(slots=True)
class Group:
    """One group's state; only Coordinator changes it."""

    name: str
    strategy: str = AVERAGE
    generation: int = 0
    members: dict[str, Member] = field(default_factory=dict)
    target: dict[MessageQueue, str] = field(default_factory=dict)
    names: tuple[str, ...] = ()  # the members that `target` was made for
    made_of: object = None  # all else that `target` depends on
    # Dicts of queues are replaced, or changed between two pieces of a rebalance only.
    shaken: bool = True  # more has changed since the last rebalance than that queues came free
    freed: list[MessageQueue] = field(default_factory=list)  # those
    # The last target that the strategy made; `target` is another one while holding back.
    allocated: dict[MessageQueue, str] = field(default_factory=dict)
    outdated: bool = False  # a new generation is due, whatever the target
    # Static member id → its newest incarnation; the longest unchanged first.
    incarnations: dict[str, int] = field(default_factory=dict)
    holdings: dict[MessageQueue, Holding] = field(default_factory=dict)
    # What replaced processes may still consume: nobody is given it.
    replaced: dict[MessageQueue, Replaced] = field(default_factory=dict)
    # While holding back: members known from before and not back yet, with their session timeouts in
    # ms; None: nobody here knows who they are.
    absent: dict[str, int] | None = field(default_factory=dict)
    hold_until_ms: int | None = None
    left: set[str] = field(default_factory=set)  # while holding back: who said goodbye here
    young_until_ms: int = 0  # until then former members may come that others have not heard of
    empty_since_ms: int = 0
    reads_since_ms: dict[str, int] = field(default_factory=dict)
    """Of each topic that its members read, or read last."""

    def reads(self, topics: Iterable[str], now_ms: int) -> bool:
        """Members read these topics; whether others were read before."""
        since_ms = {topic: self.reads_since_ms.get(topic, now_ms) for topic in topics}
        before, self.reads_since_ms = self.reads_since_ms, since_ms
        return since_ms != before

    def member_ids(self) -> tuple[str, ...]:
        """Answers who may hold queues, present or awaited, sorted; none while that is unknown."""
        return () if self.absent is None else tuple(sorted({*self.members, *self.absent}))

    def held(self) -> Pieces[dict[str, list[MessageQueue]]]:
        """Answers the queues that each member has now, sorted, whatever happens meanwhile."""
        held: defaultdict[str, list[MessageQueue]] = defaultdict(list)
        holders = [(queue, holding.member_id) for queue, holding in self.holdings.items()]
        for part in parts(holders):
            yield
            for queue, member_id in part:
                held[member_id].append(queue)
        for queues in held.values():
            yield
            queues.sort()
        return held

    def all_held_by(self, member_ids: Set[str]) -> list[MessageQueue]:
        """Answers the queues that some members have, in no order."""
        return [q for q, holding in self.holdings.items() if holding.member_id in member_ids]

    def current(self) -> Pieces[dict[MessageQueue, str]]:
        """Answers who has, or else shall have, which queue; what is being given up comes last."""
        settled: dict[MessageQueue, str] = {}
        leaving: dict[MessageQueue, str] = {}
        for held in parts(self.holdings.items()):
            for queue, holding in held:
                stays = self.allocated.get(queue, holding.member_id) == holding.member_id
                (settled if stays else leaving)[queue] = holding.member_id
            yield
        for given in parts(self.allocated.items()):
            settled.update((queue, m) for queue, m in given if queue not in self.holdings)
            yield
        settled.update(leaving)
        return settled

    def shares(self) -> Pieces[dict[str, list[MessageQueue]]]:
        """Member → its queues, for strategies that look at what they answered last."""
        shares: dict[str, list[MessageQueue]] = {}
        if self.strategy not in WITHOUT_MEMORY:
            for part in parts(self.allocated.items()):
                for queue, member in part:
                    shares.setdefault(member, []).append(queue)
                yield
        return shares


def check_agree(group: str, one: Hello | Member, other: Hello | Member) -> None:
    """Raises InvalidArgument, to the one, if they cannot be members of one group."""
    if (one.strategy or AVERAGE) != (other.strategy or AVERAGE):
        raise InvalidArgument(
            f"strategy: {one.strategy or AVERAGE!r}, the other members of group {group!r} use"
            f" {other.strategy or AVERAGE!r}; all members of a group use one allocation strategy",
            field="strategy",
            value=one.strategy,
            limit=other.strategy or AVERAGE,
        )
    subscriptions.check_same(group, one.subscriptions, other.subscriptions)


def check_owned(name: str, queues: int) -> None:
    """Raises InvalidArgument for more queues than a member may have."""
    checks.count(name, queues, 0, OWNED_MAX, "queues")
