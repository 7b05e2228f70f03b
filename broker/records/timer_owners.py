"""Which timer service has which queue of %TIMER%.  Pure.

Owned by: Tables.  Mutated by: the event loop.

A queue belongs to the data directory that claimed it first, named by its producer id: what the
service has taken over lies there and nowhere else, so two of them would fire everything twice.

    free ── claim ──► owned ── release (an operator) ──► released ── claim by another ──► owned
     ▲                │ ▲                                   │          the first is fenced for good
     └── hand-over ───┘ └────────── claim by the same ──────┘

A service hands over what its shard has no more, from when there was another number of shards, and
says how far it had taken it over: there the next one begins.  No two own a queue at a time,
whatever each believes the number to be.

Who has handed all over still holds what it took over, until it says that it is empty, or is
released: it is told to all, so that nobody forgets it, and no other data directory gets a queue of
its shard.

Who waits for a hand-over comes before any other data directory of the same shard, for as long as
it is alive: else the moment of the hand-over would decide between the two.

Of a service with replicas whoever led before, and is late, claims and hands over nothing: what the
one that leads has taken over since, the next owner would take over, too.  The first claim after a
start hands over nothing, either: the log lacks the last epoch if an older release wrote it, or if
there was no space, and the next claim comes in a moment.

Claims, with their epochs, hand-overs and releases are entries of the log (journal.py).  Who waits,
and who was seen or refused when, is not: that is of a clock that nobody sets.  So a broker that
starts anew takes any service that it knows for one that may wait, until that had the time to say
so.
"""

from collections.abc import Container, Iterable
from dataclasses import replace
from typing import Any

from duemq.errors import FencedTimer, InvalidArgument, Overloaded, Unavailable
from duemq_server.broker.records import timer_claims
from duemq_server.broker.records.timer_claims import NOT_KNOWN, Claim, Claimant, Decision, Service

# Claimed ids, fenced ones included.
SERVICES_MAX = 4_096
# Claimants, those included whose claims were never written.
SEEN_MAX = 2 * SERVICES_MAX
# An owner that was here more recently is alive: its queues are not released.
ALIVE_MS = 60_000


class TimerOwners:
    """The claims of all timer services at this broker."""

    def __init__(self) -> None:
        self._claims: dict[int, Claim] = {}  # by id
        self._owners: dict[int, int] = {}  # id by queue
        self._fenced: dict[int, str] = {}  # names by id
        self._begins: dict[int, int] = {}  # by queue; where its owner found it
        self._claimants: dict[int, Claimant] = {}  # by id
        self._refused: dict[int, tuple[Service, int]] = {}  # by queue
        self._awaited_ms: dict[int, int] = {}  # from when on those were missed that nobody has seen
        self.unclaimed: dict[int, int] = {}
        """By queue, until it is fetched from: where it ended at a start, or goes on by a claim."""

    # -- questions --------------------------------------------------------------------------------

    def knows(self, service_id: int) -> bool:
        """Whether the service claimed anything and was not replaced."""
        return service_id in self._claims

    def check_not_fenced(self, service_id: int) -> None:
        """Raises FencedTimer for a service whose queues another one has taken over."""
        if service_id in self._fenced:
            raise FencedTimer(
                f"timer_id: {self._fenced[service_id]} was released by an operator, and"
                " replaced: its data directory must not be used any more",
                field="timer_id",
                value=service_id,
            )

    def check(self, queue_id: int, service_id: int, steady_ms: int) -> None:
        """Raises FencedTimer unless the service owns the queue."""
        self.check_not_fenced(service_id)
        if self._owners.get(queue_id, 0) != service_id or not service_id:
            raise self._not_owner(queue_id, service_id, steady_ms)
        self._claimants.setdefault(service_id, Claimant(steady_ms)).seen_ms = steady_ms

    def _not_owner(self, queue_id: int, service_id: int, steady_ms: int) -> FencedTimer:
        owner = self._claims.get(self._owners.get(queue_id, 0))
        if owner is None:
            said = "belongs to nobody: claim it first"
        else:
            seen = self._seen(owner.service.id, steady_ms)
            said = f"belongs to the timer service {owner.service}, {seen}"
        return FencedTimer(
            f"timer_id: queue {queue_id} of %TIMER% {said}",
            field="timer_id",
            value=service_id,
            limit=owner.service.id if owner else 0,
        )

    def _seen(self, service_id: int, steady_ms: int) -> str:
        seen_ms = self.last_seen_ms(service_id)
        return f"last seen {(steady_ms - seen_ms) / 1000:.0f} s ago" if seen_ms else "not seen yet"

    def _check_first(self, service: Service, wanted: tuple[int, ...], steady_ms: int) -> None:
        """Raises FencedTimer if another service of the same shard waits, or holds timers."""
        known = self._claims.get(service.id)
        if not wanted or (known is not None and known.queues):
            return
        others = (each for each in self._claims.values() if each.service.id != service.id)
        for claim in others:
            other = claim.service
            away = not self._is_alive(other.id, steady_ms)
            if other.shard != service.shard or (claim.released and (claim.queues or away)):
                continue
            if not (claim.queues or other.empty):
                why = "holds what it took over of this shard before"
            elif other.shards == service.shards and self._may_wait(other.id, steady_ms):
                why = (
                    "claimed the queues of this shard before, and waits until they are handed over"
                )
            else:
                continue
            self._refused |= dict.fromkeys(wanted, (service, steady_ms))
            raise FencedTimer(
                f"timer_id: the timer service {other}, {self._seen(other.id, steady_ms)}, {why}",
                field="timer_id",
                value=service.id,
                limit=other.id,
            )

    def _check_epoch(self, service: Service, epoch: int) -> bool:
        """Whether it is the first since this start that is heard of.  Raises Unavailable.

        Of one service they never go back, but where it had no replicas meanwhile.
        """
        claimant, claim = self._claimants.get(service.id), self._claims.get(service.id)
        heard = claimant.epoch if claimant is not None else 0
        known = max(heard, claim.epoch if claim is not None else 0)
        if 0 < epoch < known:
            raise Unavailable(
                f"epoch: another replica of {service} leads, since epoch {known}; the one that"
                f" claims led in epoch {epoch}",
                field="epoch",
                value=epoch,
                limit=known,
            )
        return epoch > 0 and not heard

    def _is_alive(self, service_id: int, steady_ms: int) -> bool:
        claimant = self._claimants.get(service_id)
        return claimant is not None and steady_ms - claimant.seen_ms < ALIVE_MS

    def _may_wait(self, service_id: int, steady_ms: int) -> bool:
        claimant = self._claimants.get(service_id)
        if claimant is not None:
            return claimant.waits and self._is_alive(service_id, steady_ms)
        since_ms = self._awaited_ms.setdefault(service_id, steady_ms)
        return steady_ms - since_ms < ALIVE_MS

    def check_claim(
        self, service: Service, queues: Iterable[int], steady_ms: int, epoch: int = 0
    ) -> Decision:
        """What becomes of the claim.  `epoch`: in which the claimant leads; 0: it has no replicas.

        Raises FencedTimer if another service of the same shard has a queue or waits for it, or if
        the service divides timer keys over another number of shards; Unavailable if nobody has
        said yet over how many, or if another replica leads now; InvalidArgument, Overloaded.
        """
        wanted = tuple(queues)
        timer_claims.check(service, wanted)
        self.check_not_fenced(service.id)
        first = self._check_epoch(service, epoch)
        waits: dict[int, Service] = {}
        for queue_id in wanted:
            owner = self._claims.get(self._owners.get(queue_id, 0))
            if owner and owner.service.id != service.id and not owner.released:
                self._refused[queue_id] = service, steady_ms
                if owner.service.shard == service.shard:
                    raise self._not_owner(queue_id, service.id, steady_ms)
                waits[queue_id] = owner.service
        self._check_first(service, wanted, steady_ms)
        service = self._divided(service)
        if service.id not in self._claims and len(self._claims) + len(self._fenced) >= SERVICES_MAX:
            raise Overloaded(
                f"timer_id: {SERVICES_MAX} timer services were ever here, the most allowed",
                field="timer_id",
                limit=SERVICES_MAX,
            )
        if service.id not in self._claimants and len(self._claimants) >= SEEN_MAX:
            # For want of room, say.
            for other_id in self._claimants.keys() - self._claims.keys():
                del self._claimants[other_id]
        self._claimants[service.id] = Claimant(steady_ms, bool(waits), epoch)
        known = self._claims.get(service.id)
        before = known.queues if known is not None else ()
        leaves = () if first else tuple(queue for queue in before if not service.has(queue))
        granted = tuple(queue for queue in wanted if queue not in waits)
        if len(leaves) < len(before) or granted or service.keeps_keys:
            service = replace(service, empty=False)
        queues = tuple(sorted({*before, *granted}))
        changes = known is None or known != replace(
            known, service=service, queues=queues, released=False
        )
        changes = changes or bool(self._replaced_by(service, queues))
        leads_anew = known is not None and known.epoch != epoch
        return Decision(service, granted, waits, leaves, changes, leads_anew)

    @property
    def key_shards(self) -> int:
        """Shards that timer keys are divided over; 0: no service was here yet."""
        for claim in self._claims.values():
            return claim.service.key_shards or claim.service.shards
        return 0

    def _divided(self, service: Service) -> Service:
        """With the number of shards that keys are divided over.  Raises FencedTimer, Unavailable.

        Where nobody has said it, who does not know it must not decide it, unless it is shard 0,
        which is there from the first start on: others may be new to a cluster of fewer, of which
        this broker, new as well, has heard nothing.
        """
        known, said = self.key_shards, service.key_shards
        if not known and said == NOT_KNOWN and service.shard:
            raise Unavailable(
                f"key_shards: {service} is new, as this broker is: shard 0 is to claim first, which"
                " knows how many shards timer keys are divided over",
                field="key_shards",
            )
        divided = (known if said == NOT_KNOWN else said) or service.shards
        if known and divided != known:
            raise FencedTimer(
                f"key_shards: timer keys are divided over {divided} shards at the timer service"
                f" {service}, and over {known} here, for good",
                field="key_shards",
                value=divided,
                limit=known,
            )
        return replace(service, key_shards=0 if divided == service.shards else divided)

    def check_release(self, service_id: int, steady_ms: int) -> None:
        """Raises InvalidArgument if the service has nothing here, or has queues and is alive.

        One that has none loses nothing: what it holds is missed no longer, until it claims again.
        """
        claim = self._claims.get(service_id)
        if claim is None:
            raise InvalidArgument(
                f"id: no timer service {service_id:016x} has queues here",
                field="id",
                value=service_id,
            )
        if claim.queues and self._is_alive(service_id, steady_ms):
            ago_s = (steady_ms - self.last_seen_ms(service_id)) / 1000
            raise InvalidArgument(
                f"id: the timer service {claim.service} was here {ago_s:.0f} s ago: stop it"
                f" first, and wait {ALIVE_MS // 1000} s",
                field="id",
                value=service_id,
                limit=f"not seen for {ALIVE_MS // 1000} s",
            )

    def begin_of(self, queue_id: int) -> int:
        """The offset where a queue began for its owner, or begins for the next one."""
        return self._begins.get(queue_id, 0)

    def given_up(self, decision: Decision, formers: Container[int]) -> set[int]:
        """Queues of released services that this claim replaces, and that begin where these were.

        Not those that the claimant takes from one of its `formers`: its own copy goes on.
        """
        found: set[int] = set()
        for queue_id in decision.granted:
            claim = self.claim_of(queue_id)
            if claim is not None and claim.service.id != decision.service.id:
                copied = decision.granted if claim.service.id in formers else ()
                found.update(set(claim.queues).difference(copied))
        return found

    def claim_of(self, queue_id: int) -> Claim | None:
        """Who owns a queue."""
        return self._claims.get(self._owners.get(queue_id, 0))

    def last_seen_ms(self, service_id: int) -> int:
        """When a service last asked for anything; 0: not since this broker started."""
        claimant = self._claimants.get(service_id)
        return claimant.seen_ms if claimant is not None else 0

    def refused_of(self, queue_id: int) -> tuple[Service, int] | None:
        """Who was the last to be refused the queue since this broker started, and when."""
        return self._refused.get(queue_id)

    def holders(self, service_id: int = 0) -> list[Service]:
        """Services, but for that one, that may hold timers which nobody else has."""
        claims = (each for each in self._claims.values() if each.holds)
        return [each.service for each in claims if each.service.id != service_id]

    def epoch_of(self, service_id: int) -> int:
        """In which the replica led that claimed last; 0: the service has none."""
        claim = self._claims.get(service_id)
        return claim.epoch if claim is not None else 0

    def ids(self) -> list[int]:
        """Services that are known and not fenced."""
        return list(self._claims)

    # -- what an entry of the log does ------------------------------------------------------------

    def put(
        self, service: Service, queues: Iterable[int], since_ms: int, epoch: int | None = None
    ) -> list[int]:
        """The service claimed queues.  Answers the services that were replaced.

        `epoch`: of who leads it; None: not said, as by an older release.
        """
        known = self._claims.get(service.id)
        if epoch is None:
            epoch = known.epoch if known is not None else 0
        mine = tuple(sorted({*(known.queues if known else ()), *queues}))
        replaced = self._replaced_by(service, mine)
        for service_id in replaced:
            old = self._claims.pop(service_id)
            self._fenced[service_id] = str(old.service)
            for queue_id in old.queues:
                self._owners.pop(queue_id, None)
        since_ms = known.since_ms if known else since_ms
        self._claims[service.id] = Claim(service, mine, since_ms, epoch=epoch)
        for queue_id in mine:
            self._owners[queue_id] = service.id
            self._refused.pop(queue_id, None)
        return sorted(replaced)

    def _replaced_by(self, service: Service, queues: Iterable[int]) -> set[int]:
        """Owners of what it gets; and who was released of its shard, and has no queue."""
        owners = {self._owners[queue] for queue in queues if queue in self._owners}
        others = {
            each.service.id
            for each in self._claims.values()
            if each.released and not each.queues and each.service.shard == service.shard
        }
        return (owners | others) - {service.id}

    def hand_over(self, service_id: int, ends: Iterable[tuple[int, int]]) -> None:
        """The service has queues no more; it had taken them over up to these offsets.

        Without a checkpoint nobody knows its claim where retention has removed that.
        """
        claim = self._claims.get(service_id)
        left = dict(ends)
        if claim is not None:
            self._claims[service_id] = replace(
                claim, queues=tuple(queue for queue in claim.queues if queue not in left)
            )
        for queue_id in left:
            self._owners.pop(queue_id, None)
        self.begin(left.items())

    def begin(self, begins: Iterable[tuple[int, int]]) -> None:
        """Somebody had taken queues over up to these offsets."""
        for queue_id, offset in begins:
            if queue_id >= 0:  # what the release before made of journal.EMPTY and LED
                self._begins[queue_id] = max(offset, self.begin_of(queue_id))

    def release(self, service_id: int) -> None:
        """The next one that claims the service's queues gets them."""
        if service_id in self._claims:
            self._claims[service_id] = replace(self._claims[service_id], released=True)

    # -- the checkpoint ---------------------------------------------------------------------------

    def encode(self) -> dict[str, Any]:
        """For the checkpoint."""
        claims = self._claims.values()
        empty = [claim.service.id for claim in claims if claim.service.empty]
        epochs = [[claim.service.id, claim.epoch] for claim in claims if claim.epoch]
        return {
            "claims": [
                [claim.service.encode(), list(claim.queues), claim.since_ms, claim.released]
                for claim in claims
            ],
            "fenced": [[service_id, name] for service_id, name in self._fenced.items()],
            **({"begins": [list(each) for each in self._begins.items()]} if self._begins else {}),
            **({"empty": empty} if empty else {}),
            **({"epochs": epochs} if epochs else {}),
            **({"unclaimed": [*map(list, self.unclaimed.items())]} if self.unclaimed else {}),
        }

    def load(self, data: dict[str, Any]) -> None:
        """Puts back what `encode` gave."""
        self._fenced = dict(data.get("fenced", ()))
        self.begin(data.get("begins", ()))
        self.unclaimed = dict(data.get("unclaimed", ()))
        claims, empty = data.get("claims", ()), set(data.get("empty", ()))
        epochs = dict(data.get("epochs", ()))
        for fields, queues, since_ms, _ in claims:
            service = Service.decode(fields, fields["id"] in empty)
            self.put(service, queues, since_ms, epochs.get(service.id))
        for fields, _, _, released in claims:
            if released:
                self.release(fields["id"])
