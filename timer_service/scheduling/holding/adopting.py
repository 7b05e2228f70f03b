"""Which holds of other shards a new one takes over, while people hold and resume.  Pure.

Owned by: Holds, while a shard adopts.  It reads what others hold again and again, until a reading
brings nothing new.  Who holds or resumes meanwhile asks the others, too, but in no order: what was
asked here is the newest that can be known, and no reading takes it back.
"""

from __future__ import annotations

from collections.abc import Set
from typing import NamedTuple

Name = tuple[str, str]
"""Topic and prefix of a hold."""


class Adoption(NamedTuple):
    """What a reading changes; neither: it is settled."""

    hold: Set[Name]
    resume: Set[Name]


class Adopting:
    """See the module."""

    def __init__(self) -> None:
        self._asked: set[Name] = set()
        self.adopted: set[Name] = set()
        """Held here as the last reading says."""

    def asked(self, name: Name) -> None:
        """Somebody held or resumed it here."""
        self._asked.add(name)

    def read(self, theirs: Set[Name]) -> Adoption:
        """What others hold for good; of one that is being resumed nothing waits here."""
        theirs = theirs - self._asked
        step = Adoption(theirs - self.adopted, self.adopted - theirs - self._asked)
        self.adopted = set(theirs)
        return step

    def may_change(self, name: Name) -> bool:
        """Nobody has said otherwise since it was read."""
        return name not in self._asked
