"""A client that has schedules, holds topics, shifts and cancels much at once; round after round.

Of each round it writes down what the brokers' logs must have at the end, so that
`tests.cluster.checker` can judge: what was held is "due" when the hold was to end; what was shifted
when it was shifted to; what was cancelled never comes.  A job that touched another number than was
pending, a call that nobody answered, and a timer that was not held are events "wrong".  The
schedule of the client is judged by `tending_checker.py`.
"""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import tenacity

from duemq import Admin, Producer
from duemq.descriptions import CatchUp
from duemq.errors import DuemqError
from duemq.settings import ProducerSettings
from tests.cluster.history import History, now_ms

T = TypeVar("T")

SEND_S = 60.0
CALL_S = 90.0
"""A call is repeated for so long, until it is answered."""
POLL_S = 0.05
PAUSE_S = 0.5  # between rounds: others work, too
RETRY_S = 0.2
EVERY_MS = 1_000
HOUR_S = 3_600
HELD_DELAY_S = 0.2
LOCK = Path("jobs.lock")
"""One client at a time asks for jobs: up to 2ce558f one that came as another one ended was never
done."""
COUNT = 6  # of each kind a round; half of them under timer keys


class Wrong(Exception):
    """What must not be."""


def topics_of(topic: str) -> list[str]:
    """What is held, what is changed at once, and what a schedule of that name sends to."""
    return [f"{topic}-{what}" for what in ("held", "bulk", "beats")]


class Tender:
    """One client's topics and schedule, which no other one touches."""

    def __init__(self, admin: Admin, producer: Producer, topic: str, history: History) -> None:
        self._admin = admin
        self._producer = producer
        self._history = history
        self.held, self.bulk, self.beats = topics_of(topic)
        self._round = 0

    def begin(self) -> None:
        """The schedule; the topics are there (`topics_of`)."""
        put = self._admin.put_schedule
        self._answered(lambda: put(self.beats, topic=self.beats, every="1s", catch_up=CatchUp.ALL))

    def end(self) -> None:
        """Nothing else will come; how many the schedule has sent is written down."""
        paused = self._answered(lambda: self._admin.pause_schedule(self.beats))
        self._history.add("planned", self.beats, count=paused.stored, every_ms=EVERY_MS)

    def round(self) -> None:
        """Holds, changes what is pending, resumes."""
        self._round += 1
        name = f"{self.held}-{self._round}"
        self._history.add("round begins", name)
        try:
            self._answered(lambda: self._admin.hold_timers(self.held))
            held = self._sent(self.held, "h", HELD_DELAY_S)
            sent = self._sent(self.bulk, "b", HOUR_S)
            self._until(lambda: self._count(self.bulk).pending == len(sent), "all sent are pending")
            with LOCK.open("a", encoding="ascii") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                self._change_all(sent)
            self._until(lambda: self._count(self.held).held >= len(held), "timers are held")
            self._resume(held)
            self._until(lambda: not self._count(self.bulk).pending, "shifted timers go")
        except Wrong as error:
            self._history.add("wrong", name, error=str(error))
        self._history.add("round", name)

    # -- holds ------------------------------------------------------------------------------------

    def _resume(self, held: Sequence[str]) -> None:
        """None of them may be stored before it is asked."""
        for id in held:
            self._history.add("acked", id, due_ms=now_ms())
        self._answered(lambda: self._admin.resume_timers(self.held))

    # -- bulk jobs --------------------------------------------------------------------------------

    def _change_all(self, sent: Sequence[str]) -> None:
        """Every second round some are cancelled; the others are shifted, so that they are due."""
        gone = [id for id in sent if "key" in id] if self._round % 2 else []
        if gone:
            self._job(len(gone), lambda **job: self._admin.cancel_pending(**job, key_prefix="b"))
            for id in gone:
                self._history.add("cancelled", id, outcome="cancelled")
        shifted = [id for id in sent if id not in gone]
        since_ms = now_ms() - 1  # what would be due by then is due at once
        self._job(len(shifted), lambda **job: self._admin.shift_pending(**job, by=-2 * HOUR_S))
        for id in shifted:
            self._history.add("acked", id, due_ms=since_ms)

    def _job(self, expected: int, change: Callable[..., int]) -> None:
        """It touches what is pending, and the same when it is asked for again."""
        request_id = os.urandom(16)
        for _ in range(2):
            count = self._answered(lambda: change(topic=self.bulk, request_id=request_id))
            if count != expected:
                raise Wrong(f"a job touched {count} of {expected}")

    # -- what both do -----------------------------------------------------------------------------

    def _sent(self, topic: str, what: str, delay: float) -> list[str]:
        """Ids of what was accepted: some by way of a broker, and some under timer keys."""
        ids = []
        for number in range(COUNT):
            keyed: dict[str, Any] = {}
            id = f"{topic}-{self._round}-{number}"
            if number % 2:
                id += "-key"
                keyed = {"timer_key": f"{what}-{self._round}-{number}"}
            if self._history.send(self._producer, topic, id, delay=delay, **keyed) is not None:
                ids.append(id)
        return ids

    def _count(self, topic: str) -> Any:
        [count] = self._answered(lambda: self._admin.count_timers(topic))
        return count

    def _answered(self, ask: Callable[[], T]) -> T:
        """Asked until it is answered.  Raises Wrong."""
        retrying = tenacity.Retrying(
            stop=tenacity.stop_after_delay(CALL_S),
            wait=tenacity.wait_fixed(RETRY_S),
            retry=tenacity.retry_if_exception(
                lambda error: isinstance(error, DuemqError) and error.retryable
            ),
            reraise=True,
        )
        try:
            return retrying(ask)
        except DuemqError as error:
            raise Wrong(f"{type(error).__name__}: {error}") from error

    def _until(self, condition: Callable[[], bool], what: str) -> None:
        retrying = tenacity.Retrying(
            stop=tenacity.stop_after_delay(CALL_S),
            wait=tenacity.wait_fixed(POLL_S),
            retry=tenacity.retry_if_result(lambda true: not true),
            retry_error_callback=lambda state: False,
        )
        if not retrying(condition):
            raise Wrong(f"not within {CALL_S:g} s: {what}")


def tend(nameserver: str, topic: str, history: History, name: str, stop: threading.Event) -> None:
    """Until `stop`; the round that has begun is ended.  `topic`: how its topics' names begin."""
    settings = ProducerSettings(send_timeout_s=SEND_S)
    with Admin(nameserver) as admin, Producer(nameserver, settings=settings) as producer:
        tender = Tender(admin, producer, f"{topic}-{name}", history)
        tender.begin()
        while not stop.wait(PAUSE_S):
            tender.round()
        tender.end()
