"""Delayed messages that are kept back for a while: each timer shard keeps back its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from duemq.administering.asking import SHOWN_WITHOUT_TIMEOUT_S, refuse_missing
from duemq.administering.timer_shards import AskingShards
from duemq.descriptions import HeldTimers, ResumePolicy, TimerHold
from duemq.protocol import checks, due, names, timer_keys
from duemq.protocol.retry_policy import Delay
from duemq.v1 import stubs, timer_holds_pb2

Stub = stubs.TimerHoldsStub
Answer = timer_holds_pb2.HoldTimersResponse | timer_holds_pb2.ResumeTimersResponse
_POLICIES = {
    ResumePolicy.ALL: timer_holds_pb2.RESUME_ALL,
    ResumePolicy.NEWEST: timer_holds_pb2.RESUME_NEWEST,
    ResumePolicy.DROP_OLDER_THAN: timer_holds_pb2.RESUME_DROP_OLDER_THAN,
}
# A shard counts for a while what lies under a prefix, and drops for a while.
CHANGED_TIMEOUT_S = 3 * SHOWN_WITHOUT_TIMEOUT_S


class TimerHolds(AskingShards):
    """What the admin client does about holds."""

    async def hold_timers(
        self, topic: str, *, key_prefix: str = "", dry_run: bool = False
    ) -> HeldTimers:
        """Keeps a topic's delayed messages back, or those whose `timer_key` begins so.

        From then on none of them is sent but what was on its way; all else goes on: sending,
        `cancel`, `reschedule`, lists and counts.  `dry_run`: only says how many it is about.  May
        be repeated.  Raises InvalidArgument; Overloaded (too many holds); PartialAnswer, if a timer
        shard is away: the others keep theirs back, ask again once it is there.
        """
        check_named(topic, key_prefix)
        request = timer_holds_pb2.HoldTimersRequest(
            topic=topic, key_prefix=key_prefix, dry_run=dry_run
        )
        answers, missing = await self._each_shard(
            Stub.ask("HoldTimers", request), CHANGED_TIMEOUT_S
        )
        held = _sum(answers)
        refuse_missing(missing, partial=held)
        return held

    async def resume_timers(
        self,
        topic: str,
        *,
        key_prefix: str = "",
        policy: str = ResumePolicy.ALL,
        older_than: Delay | None = None,
        dry_run: bool = False,
    ) -> HeldTimers:
        """Ends the hold of just this topic, or just this prefix; what fell due meanwhile is sent.

        Or some of it: `policy` newest (of those with the same `key` the one that was due last, of
        each timer shard, and all without one) or drop_older_than (none that was due longer than
        `older_than` ago); the others are dropped: a cancel answers CANCELLED.  All is held until
        they are; if that takes longer, the answer is not `done`, it goes on by itself, and the same
        call tells how far.  If another hold covers it, too, it waits for the end of that; a hold of
        longer keys drops by itself.  `dry_run`: only says how many it is about.  May be repeated.
        Raises InvalidArgument; PartialAnswer, if a timer shard is away, or cannot drop all (its
        files are damaged, say) and holds all: the others' go, ask again once it is there.
        """
        check_named(topic, key_prefix)
        older_ms = older_ms_of(policy, older_than)
        request = timer_holds_pb2.ResumeTimersRequest(
            topic=topic,
            key_prefix=key_prefix,
            dry_run=dry_run,
            policy=_POLICIES[ResumePolicy(policy)],
            older_than_ms=older_ms,
        )
        answers, missing = await self._each_shard(
            Stub.ask("ResumeTimers", request), CHANGED_TIMEOUT_S
        )
        held = _sum(answers)
        if missing:
            held = replace(held, done=False)
        refuse_missing(missing, partial=held)
        return held

    async def timer_holds(self) -> list[TimerHold]:
        """What is kept back, by topic and prefix; since when the first shard does.

        Raises PartialAnswer, whose `partial` is the list, if a timer shard is away.
        """
        request = timer_holds_pb2.ListTimerHoldsRequest()
        answers, missing = await self._each_shard(
            Stub.ask("ListTimerHolds", request),
            SHOWN_WITHOUT_TIMEOUT_S,
        )
        holds: dict[tuple[str, str], TimerHold] = {}
        for each in (each for answer in answers for each in answer.holds):
            name = each.topic, each.key_prefix
            there = holds.get(name, TimerHold(*name, each.since_ms))
            since_ms = min(there.since_ms, each.since_ms)
            holds[name] = TimerHold(*name, since_ms, there.resuming or each.resuming)
        found = [holds[name] for name in sorted(holds)]
        refuse_missing(missing, partial=found)
        return found


def older_ms_of(policy: str, older_than: Delay | None) -> int:
    """How old is too old, 0 for other policies.  Raises InvalidArgument."""
    if policy not in _POLICIES:
        raise checks.wrong("policy", policy, f"one of {', '.join(ResumePolicy)}")
    if (older_than is None) == (policy == ResumePolicy.DROP_OLDER_THAN):
        raise checks.wrong("older_than", older_than, "with policy drop_older_than, and only then")
    return 0 if older_than is None else due.delay_ms(older_than, "older_than")


def check_named(topic: str, key_prefix: str) -> None:
    """Raises InvalidArgument unless that may be held."""
    names.check_topic(topic)
    if key_prefix != "":
        timer_keys.check_keyed_topic(topic)
        timer_keys.check_timer_key(key_prefix, "key_prefix")


def _sum(answers: Sequence[Answer]) -> HeldTimers:
    counted = all(each.HasField("pending") for each in answers)
    pending = sum(each.pending for each in answers) if counted else None
    was_held = bool(answers) and all(each.was_held for each in answers)
    resumed = [x for x in answers if isinstance(x, timer_holds_pb2.ResumeTimersResponse)]
    return HeldTimers(
        pending, was_held, sum(each.dropped for each in resumed), all(each.done for each in resumed)
    )
