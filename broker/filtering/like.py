"""LIKE: `%` stands for any text, `_` for one character, the escape makes one of them a plain one.

Pure.  A pattern is cut at its `%` into pieces of a fixed length.  The first and the last are bound
to the ends, those between are found from left to right, each at its first place: a place further
right never helps what follows.  So nothing is ever tried again, whatever the pattern.
"""

import re
from collections.abc import Callable
from typing import TypeAlias

TEXT_CHARACTERS_MAX = 4_096
"""Of a text that is looked at; bounds what a pattern with many `_` may cost."""

# A pass over the text costs as much as so many characters that are compared at each place.
PASS_CHARACTERS = 8

# A character, or None for any one.
Piece: TypeAlias = list[str | None]
# The end of a piece's first place in text[start:end]; -1: there is none.
Find: TypeAlias = Callable[[str, int, int], int]


class WrongPatternError(ValueError):
    """`place` in the pattern, from 0, and what is expected there."""

    def __init__(self, place: int, expected: str) -> None:
        super().__init__(place, expected)
        self.place = place
        self.expected = expected


class Pattern:
    """A compiled pattern."""

    __slots__ = ("_first", "_first_length", "_last", "_last_length", "_length", "_middle")

    def __init__(self, pattern: str, escape: str | None = None) -> None:
        """Raises WrongPatternError for an escape before anything but `%`, `_` or itself."""
        pieces = _pieces(pattern, escape)
        self._length = sum(map(len, pieces))
        self._first, self._first_length = _finder(pieces[0]), len(pieces[0])
        self._last: Find | None = None if len(pieces) == 1 else _finder(pieces[-1])
        self._last_length = len(pieces[-1])
        self._middle = [_finder(piece) for piece in pieces[1:-1] if piece]

    def matches(self, text: str) -> bool | None:
        """Tells whether the whole text is like the pattern; None: too long to be looked at."""
        if len(text) > TEXT_CHARACTERS_MAX:
            return None
        length = len(text)
        if length < self._length or self._first(text, 0, self._first_length) < 0:
            return False
        if self._last is None:
            return length == self._length
        end = length - self._last_length
        if self._last(text, end, length) < 0:
            return False
        at = self._first_length
        for find in self._middle:
            at = find(text, at, end)
            if at < 0:
                return False
        return True


def search_characters(pattern: str) -> int:
    """What a pattern may cost with the longest text, in characters that are compared at each place.

    Pieces without `_` are found in one pass, whatever their length.
    """
    return PASS_CHARACTERS + sum(len(piece) for piece in pattern.split("%") if "_" in piece)


def _pieces(pattern: str, escape: str | None) -> list[Piece]:
    pieces: list[Piece] = [[]]
    escaped = False
    for place, character in enumerate(pattern):
        if escaped and character not in ("%", "_", escape):
            raise WrongPatternError(place, "only %, _ or the escape itself may follow the escape")
        if escaped:
            pieces[-1].append(character)
            escaped = False
        elif character == escape:
            escaped = True
        elif character == "%":
            pieces.append([])
        else:
            pieces[-1].append(None if character == "_" else character)
    if escaped:
        raise WrongPatternError(len(pattern), "%, _ or the escape itself must follow the escape")
    return pieces


def _finder(piece: Piece) -> Find:
    if None in piece:
        # Of a fixed length: the engine has nowhere to go back to.
        source = "".join("." if each is None else re.escape(each) for each in piece)
        search = re.compile(source, re.DOTALL).search

        def find_search(text: str, start: int, end: int) -> int:
            found = search(text, start, end)
            return found.end() if found else -1

        return find_search
    plain = "".join(each for each in piece if each is not None)

    def find_plain(text: str, start: int, end: int) -> int:
        at = text.find(plain, start, end)
        return at if at < 0 else at + len(plain)

    return find_plain
