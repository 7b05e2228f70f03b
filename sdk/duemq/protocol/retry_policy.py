"""How often, and after which delays, what a group sends back comes again.  Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

from duemq.errors import InvalidArgument
from duemq.protocol import due

RETRIES_MAX = 1_000

Delay = float | timedelta | str
"""Seconds, a timedelta, or text as `250ms`, `5s`, `1h30m`."""


@dataclass(frozen=True, slots=True)
class ExponentialDelays:
    """`initial_ms * multiplier ^ (retry - 1)`, but `max_ms` at most."""

    initial_ms: int
    multiplier: float
    max_ms: int

    @classmethod
    def of(cls, initial: Delay, multiplier: float, longest: Delay) -> "ExponentialDelays":
        """As callers write delays.  Raises InvalidArgument."""
        return cls(due.delay_ms(initial), multiplier, due.delay_ms(longest))


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """What is None or empty is as the brokers are set."""

    retries_max: int | None = None
    """Deliveries after the first; a message that fails after them is a dead letter."""
    delays_ms: tuple[int, ...] = ()
    """Before each retry, the last one for all beyond."""
    exponential: ExponentialDelays | None = None
    """In place of a table."""


def policy_of(
    retries_max: int | None = None,
    retry_delays: Sequence[Delay] | str | None = None,
    exponential: ExponentialDelays | tuple[Delay, float, Delay] | None = None,
) -> RetryPolicy:
    """As callers write it; `retry_delays` may be one text, `"10s 30s 1m"`.

    Raises InvalidArgument.  Brokers check the delays.
    """
    if retries_max is not None and not 0 <= retries_max <= RETRIES_MAX:
        raise InvalidArgument(
            f"retries_max: {retries_max} is not allowed: 0 to {RETRIES_MAX}",
            field="retries_max",
            value=retries_max,
            limit=RETRIES_MAX,
        )
    if retry_delays is not None and exponential is not None:
        raise InvalidArgument(
            "retry_delays and exponential exclude each other",
            field="exponential",
            value=exponential,
            limit="one of the two",
        )
    if isinstance(retry_delays, str):
        retry_delays = retry_delays.split()
    if retry_delays is not None and not retry_delays:
        raise InvalidArgument(
            "retry_delays: there is none; leave it out for the brokers' own",
            field="retry_delays",
            limit="1 delay or more",
        )
    if isinstance(exponential, tuple):
        exponential = ExponentialDelays.of(*exponential)
    return RetryPolicy(retries_max, tuple(map(due.delay_ms, retry_delays or ())), exponential)
