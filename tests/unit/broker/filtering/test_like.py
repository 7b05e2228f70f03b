import pytest

from duemq_server.broker.filtering.like import (
    PASS_CHARACTERS,
    TEXT_CHARACTERS_MAX,
    Pattern,
    WrongPatternError,
    search_characters,
)


@pytest.mark.parametrize(
    ("pattern", "escape", "text", "expected"),
    [
        ("", None, "", True),
        ("", None, "a", False),
        ("%", None, "", True),
        ("%%%", None, "anything\nat all", True),
        ("_", None, "\n", True),
        ("_", None, "", False),
        ("__", None, "ab", True),
        ("__", None, "abc", False),
        ("a%", None, "abc", True),
        ("a%", None, "ba", False),
        ("%c", None, "abc", True),
        ("%a%", None, "cab", True),
        ("a%a", None, "a", False),  # the ends do not overlap
        ("a%a", None, "aa", True),
        ("ab%ba", None, "aba", False),
        ("%ab%ab%", None, "abab", True),
        ("%ab%ab%", None, "aab", False),
        ("%a_c%e", None, "xabcabcde", True),
        ("%_%_%", None, "a", False),
        ("%_%_%", None, "ab", True),
        ("A", None, "a", False),
        ("a.c", None, "abc", False),
        ("10!%", "!", "10%", True),
        ("10!%", "!", "100", False),
        ("!!!_", "!", "!_", True),
        ("%%", "%", "%", True),  # the escape is the wildcard itself
        ("ü%ß", None, "üxß", True),
    ],
)
def test_patterns(pattern: str, escape: str | None, text: str, expected: bool) -> None:
    assert Pattern(pattern, escape).matches(text) is expected


@pytest.mark.parametrize(("pattern", "place"), [("a!b", 2), ("a!", 2), ("!", 1)])
def test_an_escape_stands_before_what_can_be_escaped(pattern: str, place: int) -> None:
    with pytest.raises(WrongPatternError) as caught:
        Pattern(pattern, "!")
    assert caught.value.place == place


def test_too_long_a_text_is_not_looked_at() -> None:
    assert Pattern("%").matches("a" * TEXT_CHARACTERS_MAX) is True
    assert Pattern("%").matches("a" * (TEXT_CHARACTERS_MAX + 1)) is None


def test_many_wildcards_do_not_multiply() -> None:
    text = "a" * TEXT_CHARACTERS_MAX
    assert Pattern("%a" * 1_000 + "%b").matches(text) is False
    assert Pattern("%a_" * 1_000 + "%b%").matches(text) is False


def test_what_makes_a_search_expensive_is_counted() -> None:
    assert search_characters("%abc%") == search_characters("%") == PASS_CHARACTERS
    assert search_characters("%a_c%__%x") == PASS_CHARACTERS + 5
