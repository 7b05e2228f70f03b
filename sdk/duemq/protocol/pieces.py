"""Long work in pieces: a generator yields where others may have a turn, and returns the answer.

Pure: who runs it decides how long to go on.  Between two yields lies about a millisecond.
"""

from collections.abc import Generator, Iterable, Iterator
from itertools import islice
from typing import TypeVar

T = TypeVar("T")

Pieces = Generator[None, None, T]

PIECE = 1_024  # queues looked at between two yields


def finish(work: Pieces[T]) -> T:
    """Does all of it at once."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            answer: T = end.value
            return answer


def parts(items: Iterable[T], size: int = PIECE) -> Iterator[tuple[T, ...]]:
    """Answers the items, `size` at a time; they must not change meanwhile."""
    rest = iter(items)
    while part := tuple(islice(rest, size)):
        yield part
