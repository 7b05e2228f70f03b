"""Tag filters: `a || b` takes messages of tag a or b, `*` or nothing takes all.  Pure.

A broker compares hashes (CRC-32 of UTF-8, 0 for no tag); the consumer compares the tags themselves.
"""

from dataclasses import dataclass
from zlib import crc32

from duemq.errors import InvalidArgument

ALL = "*"
SEPARATOR = "||"
TAGS_MAX = 64
FILTER_CHARACTERS_MAX = 4_096


def tag_hash(tag: str | None) -> int:
    """Answers the hash that stands for a tag; 0 only for none."""
    return (crc32(tag.encode()) or 1) if tag else 0


@dataclass(frozen=True, slots=True)
class TagFilter:
    """Which messages a subscription takes."""

    tags: frozenset[str] = frozenset()
    """Empty: all messages."""

    @classmethod
    def parse(cls, text: str) -> "TagFilter":
        """Raises InvalidArgument for an empty alternative, too many of them, or too long a text."""
        if len(text) > FILTER_CHARACTERS_MAX:
            limit = f"at most {FILTER_CHARACTERS_MAX} characters"
            message = f"filter: {len(text)} characters, {limit} are allowed"
            raise InvalidArgument(message, field="filter", value=len(text), limit=limit)
        if text.strip() in ("", ALL):
            return cls()
        tags = [tag.strip() for tag in text.split(SEPARATOR)]
        limit = f"1 to {TAGS_MAX} tags separated by {SEPARATOR}, or {ALL}"
        if "" in tags:
            message = f"filter {text!r:.200} is not of the form a || b: a tag is missing"
            raise InvalidArgument(message, field="filter", value=text, limit=limit)
        if len(tags) > TAGS_MAX:
            message = f"filter: {len(tags)} tags, 1 to {TAGS_MAX} are allowed"
            raise InvalidArgument(message, field="filter", value=len(tags), limit=limit)
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
