"""Messages that are kept back in the twin, as the admin client has them kept by timer shards."""

from __future__ import annotations

from duemq.administering.holds import check_named, older_ms_of
from duemq.descriptions import HeldTimers, TimerHold
from duemq.protocol.retry_policy import Delay
from duemq.testing.broker import MemoryBroker


def hold(broker: MemoryBroker, topic: str, key_prefix: str, *, dry_run: bool) -> HeldTimers:
    """As `Admin.hold_timers`."""
    check_named(topic, key_prefix)
    name = topic, key_prefix
    was_held = name in broker.kept_back
    if not dry_run:
        broker.kept_back.setdefault(name, broker.now_ms)
    return HeldTimers(broker.under(name), was_held)


def resume(
    broker: MemoryBroker,
    topic: str,
    key_prefix: str,
    policy: str,
    older_than: Delay | None,
    *,
    dry_run: bool,
) -> HeldTimers:
    """As `Admin.resume_timers`; it is done at once."""
    check_named(topic, key_prefix)
    older_ms = older_ms_of(policy, older_than)
    name = topic, key_prefix
    pending = broker.under(name)
    if dry_run:
        return HeldTimers(pending, name in broker.kept_back)
    was_held, dropped = broker.resume(name, policy, older_ms)
    return HeldTimers(pending, was_held, dropped)


def holds(broker: MemoryBroker) -> list[TimerHold]:
    """As `Admin.timer_holds`."""
    return [TimerHold(*name, since_ms) for name, since_ms in sorted(broker.kept_back.items())]
