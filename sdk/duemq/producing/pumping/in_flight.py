"""What is on its way to one broker, and what is sent again when its stream breaks.

A frame that is in flight when the stream breaks is sent again, first and in the old order: its
outcome is unknown, and the same numbers make the broker store it once.  From then on it is
*repeated*: a refusal no longer proves that it is not stored, unless it is for what it holds, so it
is kept and, after what is in flight behind it, sent again, here and nowhere else.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from duemq.errors import DuemqError, Internal, OutOfSequence
from duemq.producing.batch import Batch
from duemq.producing.pumping.sequence_lane import SequenceLane


class BatchStored(Protocol):
    """Where a batch was stored (message of the protocol: BatchResult)."""

    @property
    def queue_id(self) -> int: ...  # noqa: D102
    @property
    def base_offset(self) -> int: ...  # noqa: D102
    @property
    def store_ms(self) -> int: ...  # noqa: D102
    @property
    def due_ms(self) -> bytes: ...  # noqa: D102
    @property
    def duplicate(self) -> bool: ...  # noqa: D102


class Answer(NamedTuple):
    """A broker's, to one frame."""

    request_id: int
    broker: str
    """As it calls itself; empty: as it is known."""
    store_id: int
    results: Sequence[BatchStored | DuemqError]
    """One for each batch."""


class Frame:
    """A request: batches for one broker that travel together."""

    def __init__(
        self, batches: list[Batch], lanes: list[SequenceLane], *, repeated: bool = False
    ) -> None:
        """The batches are encoded; `lanes` are those that numbered them, one for each.

        `repeated`: they may be stored by an earlier attempt.
        """
        self.batches = batches
        self.lanes = lanes
        self.repeated = repeated
        self.encoded = (
            batches[0].encoded
            if len(batches) == 1
            else b"".join([batch.encoded for batch in batches])
        )
        self.size = sum(batch.size for batch in batches)
        self.sent_ms = 0.0
        """When it was written to the stream; the link says so."""

    @property
    def request_id(self) -> int:
        """The last batch's number: that of merged requests (see `batch_encoding`)."""
        return self.batches[-1].number

    def judged(
        self, results: Sequence[BatchStored | DuemqError]
    ) -> Sequence[BatchStored | DuemqError]:
        """What its batches' answers say.

        The first attempt of one finds no other of its numbers, unless they were somebody else's: of
        a client that goes on as it was before, or at a broker that was taken for another one.
        """
        if self.repeated:
            return results
        return [
            OutOfSequence("the broker has another batch of these numbers")
            if not isinstance(each, DuemqError) and each.duplicate
            else each
            for each in results
        ]

    def wanted(self) -> "Frame | None":
        """The frame as it is sent again, without the batches that were given up."""
        left = [
            (batch, lane)
            for batch, lane in zip(self.batches, self.lanes, strict=True)
            if not batch.done
        ]
        if len(left) == len(self.batches):
            self.repeated = True
            return self
        if not left:
            return None
        return Frame([batch for batch, _ in left], [lane for _, lane in left], repeated=True)


class InFlight:
    """To one broker."""

    def __init__(self, broker: str, frames_max: int) -> None:
        self.broker = broker
        self.bytes = 0
        self.up = False
        """A stream stands."""
        self.paused_until_ms = 0.0
        """Takes no new frames before this time, after a refusal."""
        self.put_ms = 0.0
        """When the last frame was put."""
        self.last_error: DuemqError | None = None
        self._frames_max = frames_max
        self._unanswered: deque[Frame] = deque()
        # Repeated frames that were refused.  All of `_unanswered` is behind them.
        self._kept: list[Frame] = []

    @property
    def awaited(self) -> bool:
        """A frame is on its way for the first time, so that its answer is worth waiting for."""
        return bool(self._unanswered) and not self._unanswered[-1].repeated

    @property
    def idle(self) -> bool:
        """Nothing is on its way, and nothing is to be sent again."""
        return not (self._unanswered or self._kept)

    def ready(self, now_ms: float) -> bool:
        """A frame may be put."""
        return (
            self.up
            and not self._kept
            and len(self._unanswered) < self._frames_max
            and now_ms >= self.paused_until_ms
        )

    def put(self, frame: Frame, now_ms: float) -> None:
        """A new frame is sent.  Only when `ready`."""
        self.put_ms = now_ms
        self.bytes += frame.size
        self._unanswered.append(frame)

    def may_repeat(self, now_ms: float) -> bool:
        """There are frames that were kept, and it is time to send them again."""
        return bool(self._kept) and (
            self.up and not self._unanswered and now_ms >= self.paused_until_ms
        )

    def repeat(self) -> list[Frame]:
        """The frames that were kept: they are sent again."""
        kept, self._kept = self._kept, []
        return self._send_again(kept)

    def came_up(self) -> list[Frame]:
        """A stream stands: answers what is sent on it first."""
        self.up = True
        kept, self._kept = self._kept, []
        return self._send_again([*kept, *self._unanswered])

    def _send_again(self, frames: Iterable[Frame]) -> list[Frame]:
        """All that is in flight from now on."""
        wanted = [again for frame in frames if (again := frame.wanted()) is not None]
        self._unanswered = deque(wanted)
        self.bytes = sum(frame.size for frame in wanted)
        return wanted

    def broke(self, error: DuemqError) -> None:
        """The stream is no more, or did not come up."""
        self.up = False
        self.last_error = error

    def drop_done(self) -> None:
        """Frames of which all was given up are not sent again.  Only while there is no stream."""
        self._kept = _wanted(self._kept)
        self._unanswered = deque(_wanted(self._unanswered))
        self.bytes = sum(frame.size for frame in (*self._kept, *self._unanswered))

    def answered(self, request_id: int, results: int) -> Frame:
        """The frame that an answer with so many results is for.

        Raises Internal for any other than the next: then the stream is to be given up.
        """
        if not self._unanswered or self._unanswered[0].request_id != request_id:
            raise Internal(f"broker {self.broker} answered request {request_id}, which is not next")
        frame = self._unanswered[0]
        if results != len(frame.batches):
            raise Internal(
                f"broker {self.broker} answered {results} batches of {len(frame.batches)}"
            )
        self._unanswered.popleft()
        self.bytes -= frame.size
        return frame

    def keep(self, frame: Frame) -> None:
        """Holds a repeated frame back that was refused; `repeat` answers it when it is time."""
        self._kept.append(frame)
        self.bytes += frame.size

    def keeps(self, batch: Batch) -> bool:
        """It was refused and waits to be sent again: nothing of it is on its way."""
        return any(batch in frame.batches for frame in self._kept)


def _wanted(frames: Iterable[Frame]) -> list[Frame]:
    return [frame for frame in frames if not all(batch.done for batch in frame.batches)]
