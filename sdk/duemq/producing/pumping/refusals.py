"""What a broker's refusal tells about the batch, and what it leaves open."""

from duemq.errors import DuemqError, Fenced, OutOfSequence, Timeout
from duemq.producing.batch import Batch
from duemq.producing.pumping.sequence_lane import SequenceLane


def undecided(lane: SequenceLane, batch: Batch, error: DuemqError) -> bool:
    """Whether this answer to a repeat leaves open what the earlier attempt did, or will do."""
    if isinstance(error, OutOfSequence):
        # A late copy of a batch in front of it, and so of this one, may be on its way.
        return missing_before(error) and lane.doubtful_before(batch)
    return may_be_repeated(error)


def may_be_repeated(error: DuemqError) -> bool:
    """The same batch can succeed later, under the same numbers."""
    return error.retryable and not isinstance(error, Timeout)


def missing_before(error: OutOfSequence) -> bool:
    """The broker does not have the batch, as it expects one in front of it.

    Otherwise it has it, and no longer knows where.
    """
    sequence, expected = error.value, error.limit
    return sequence.isdecimal() and expected.isdecimal() and int(sequence) > int(expected)


def doubted(error: DuemqError) -> DuemqError:
    """The refusal of a repeat, with what it does not tell."""
    if isinstance(error, Fenced):
        return Timeout(f"whether the message is stored is unknown: {error}")
    return type(error)(
        f"{error.message}; an earlier attempt may have been stored",
        field=error.field,
        value=error.value,
        limit=error.limit,
        retryable=error.retryable,
    )
