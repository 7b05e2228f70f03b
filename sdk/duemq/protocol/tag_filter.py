"""Tag filters: `a || b` takes messages of tag a or b, `*` or nothing takes all.  Pure.

A broker compares hashes (CRC-32 of UTF-8, 0 for no tag); the consumer compares the tags themselves.
"""

from dataclasses import dataclass

from duemq.protocol import checks
from duemq.protocol.limits import FILTER_CHARACTERS_MAX
from duemq.protocol.record_bytes import text_hash

ALL = "*"
SEPARATOR = "||"
TAGS_MAX = 64


def tag_hash(tag: str | None) -> int:
    """Answers the hash that stands for a tag; 0 only for none."""
    return text_hash(tag.encode()) if tag else 0


@dataclass(frozen=True, slots=True)
class TagFilter:
    """Which messages a subscription takes."""

    tags: frozenset[str] = frozenset()
    """Empty: all messages."""

    @classmethod
    def parse(cls, text: str) -> "TagFilter":
        """Raises InvalidArgument for an empty alternative, too many of them, or too long a text."""
        checks.length("filter", text, 0, FILTER_CHARACTERS_MAX)
        if text.strip() in ("", ALL):
            return cls()
        tags = [tag.strip() for tag in text.split(SEPARATOR)]
        if "" in tags:
            raise checks.wrong("filter", text, f"tags as a {SEPARATOR} b: one is missing")
        checks.count("filter", len(tags), 1, TAGS_MAX, "tags")
        return cls() if ALL in tags else cls(frozenset(tags))

    @property
    def takes_all(self) -> bool:
        """True when nothing is filtered."""
        return not self.tags

    @property
    def hashes(self) -> frozenset[int]:
        """What to compare with a record's tag hash."""
        return frozenset(map(tag_hash, self.tags))

    def takes(self, tag: str | None) -> bool:
        """Tells whether a message of this tag is wanted."""
        return not self.tags or tag in self.tags
