from zlib import crc32

import pytest

from duemq.errors import InvalidArgument
from duemq.protocol.filters import FILTER_CHARACTERS_MAX, TAGS_MAX, TagFilter, tag_hash


@pytest.mark.parametrize("text", ["", "*", " * ", "a || *"])
def test_takes_all(text: str) -> None:
    tags = TagFilter.parse(text)
    assert tags.takes_all
    assert tags.takes(None)
    assert tags.takes("anything")


@pytest.mark.parametrize("text", ["a||b", "a || b", " a  ||  b ", "b || a || b"])
def test_takes_what_is_named(text: str) -> None:
    tags = TagFilter.parse(text)
    assert tags.tags == {"a", "b"}
    assert tags.takes("a")
    assert tags.takes("b")
    assert not tags.takes("ab")
    assert not tags.takes("")
    assert not tags.takes(None)


@pytest.mark.parametrize("text", ["||", "a ||", "|| a", "a || || b"])
def test_an_empty_alternative_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        TagFilter.parse(text)
    assert refused.value.field == "filter"
    assert refused.value.value == text


def test_too_much_is_refused() -> None:
    with pytest.raises(InvalidArgument, match=f"{TAGS_MAX + 1} tags, 1 to {TAGS_MAX}"):
        TagFilter.parse(" || ".join(f"t{number}" for number in range(TAGS_MAX + 1)))
    with pytest.raises(InvalidArgument, match=f"characters, at most {FILTER_CHARACTERS_MAX}"):
        TagFilter.parse("t" * (FILTER_CHARACTERS_MAX + 1))


def test_hashes_are_those_of_the_wire() -> None:
    assert tag_hash(None) == 0
    assert tag_hash("") == 0
    assert tag_hash("ü") == crc32("ü".encode())
    assert TagFilter.parse("a || ü").hashes == {crc32(b"a"), crc32("ü".encode())}
