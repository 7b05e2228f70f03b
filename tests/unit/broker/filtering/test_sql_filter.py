from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest

from duemq.errors import InvalidArgument
from duemq.protocol.limits import FILTER_CHARACTERS_MAX
from duemq_server.broker.filtering import filters
from duemq_server.broker.filtering.filters import Expressions, TextCache, check_filter
from duemq_server.broker.filtering.sql_filter import SqlFilter
from duemq_server.broker.filtering.sql_grammar import DEPTH_MAX, IN_VALUES_MAX
from duemq_server.broker.filtering.sql_numbers import number_of


@dataclass
class Message:
    properties: Mapping[str, str] = field(default_factory=dict)
    tag: str = ""
    key: str = ""


ORDER = Message(
    {
        "price": "12.50",
        "count": "3",
        "region": "eu",
        "note": "50% off_now",
        "paid": "True",
        "empty": "",
        "and so": "on",
        "TAGS": "a property",
    },
    tag="red",
    key="k-1",
)


def truth(expression: str, message: Message = ORDER) -> bool | None:
    """What an expression is of a message: True, False, or None for unknown."""
    if SqlFilter(expression).matches(message):
        return True
    return False if SqlFilter(f"NOT ({expression})").matches(message) else None


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("price = 12.5", True),
        ("price = '12.5'", False),  # a text beside a text
        ("12.5 = price", True),
        ("price > 12 AND price < 13", True),
        ("10 < price", True),
        ("10 >= price", False),
        ("count = 3.0", True),
        ("count = +3", True),
        ("count > -3e0", True),
        ("count <> 3", False),
        ("region = 'eu'", True),
        ("region < 'us'", True),
        ("region > 'EU'", True),
        ("region <> 'us'", True),
        ("paid = TRUE", True),
        ("paid", True),
        ("NOT paid", False),
        ("paid <> false", True),
        ("paid = (count = 3)", True),
        ("price > count", True),  # numbers both
        ("region > count", True),  # texts, since one is no number
        ("empty = ''", True),
        ("empty IS NULL", False),
        ("nothing IS NULL", True),
        ("nothing IS NOT NULL", False),
        ("price BETWEEN 12.5 AND 13", True),
        ("price NOT BETWEEN 12.5 AND 13", False),
        ("count BETWEEN 3 AND 3 AND region = 'eu'", True),
        ("region BETWEEN 'ea' AND 'ez'", True),
        ("region IN ('us', 'eu')", True),
        ("region NOT IN ('us', 'uk')", True),
        ("count IN (1, 2, 3)", True),
        ("count IN (1, 'x', '3')", True),
        ("TAGS = 'red'", True),
        ("KEYS = 'k-1'", True),
        ("\"TAGS\" = 'a property'", True),
        ("tags IS NULL", True),
        ("\"and so\" = 'on'", True),
        ("note LIKE '50!%%' ESCAPE '!'", True),
        ("note LIKE '%off!_now' ESCAPE '!'", True),
        ("note LIKE '___ off_now'", True),
        ("note NOT LIKE '%on%'", True),
        ("note LIKE '50'", False),
        ("count LIKE '_'", True),
        ("TRUE", True),
        ("FALSE", False),
        ("'a' = 'a' AND 1 < 2", True),
        ("'it''s' = 'it''s'", True),
        ("1 IN (1, 2)", True),
        ("'a' IN ('b')", False),
        ("TRUE IS NULL", False),
    ],
)
def test_what_expressions_say_of_an_order(expression: str, expected: bool) -> None:
    assert truth(expression) is expected


@pytest.mark.parametrize(
    "expression",
    [
        "nothing = 1",
        "nothing <> 1",
        "nothing = nothing",
        "nothing LIKE '%'",
        "nothing IN (1)",
        "nothing BETWEEN 1 AND 2",
        "nothing",
        "region > 5",
        "region <> 5",
        "region BETWEEN 1 AND 5",
        "region IN (1, 2)",
        "region",
        "region = TRUE",
        "count = TRUE",
        "paid > FALSE",
        "1 = '1'",
        "TRUE = 'true'",
        "1 LIKE '1'",
        "TRUE IN (1)",
        "'a' IN (1)",
        "1 IN ('a')",
        "1 BETWEEN 'a' AND 'b'",
        "(price > 1) = 'x'",
    ],
)
def test_what_is_not_set_or_of_a_wrong_type_is_unknown_and_never_matches(expression: str) -> None:
    assert truth(expression) is None


def test_unknown_goes_through_and_or_not_as_in_sql() -> None:
    values = {"TRUE": True, "FALSE": False, "x = 1": None}
    for left, one in values.items():
        for right, other in values.items():
            both = [one, other]
            conjunction = False if False in both else None if None in both else True
            disjunction = True if True in both else None if None in both else False
            assert truth(f"{left} AND {right}") is conjunction
            assert truth(f"{left} OR {right}") is disjunction


def test_not_binds_before_and_and_that_before_or() -> None:
    assert truth("NOT FALSE AND TRUE OR FALSE") is True
    assert truth("TRUE OR FALSE AND FALSE") is True
    assert truth("(TRUE OR FALSE) AND FALSE") is False
    assert truth("NOT region = 'us' AND count = 3") is True


def test_a_tag_or_key_that_is_not_there_is_null() -> None:
    bare = Message()
    assert truth("TAGS IS NULL AND KEYS IS NULL", bare) is True
    assert truth("TAGS = 'red'", bare) is None


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("0", 0),
        ("-7", -7),
        ("+7", 7),
        ("1.", 1.0),
        (".5", 0.5),
        ("1e3", 1000.0),
        ("9007199254740993", 9007199254740993),
        ("007", 7),
        ("", None),
        ("1_000", None),
        (" 1", None),
        ("1 ", None),
        ("0x10", None),
        ("nan", None),
        ("inf", None),
        ("1e999", None),
        ("٣", None),
        ("1" * 65, None),
        ("-", None),
        (".", None),
    ],
)
def test_which_texts_are_numbers(text: str, number: float | None) -> None:
    found = number_of(text)
    assert found == number
    assert type(found) is type(number)


def test_integers_compare_exactly() -> None:
    message = Message({"n": "9007199254740993"})
    assert truth("n = 9007199254740993", message) is True
    assert truth("n = 9007199254740992", message) is False


@pytest.mark.parametrize(
    ("expression", "place", "said"),
    [
        ("", "line 1, column 1", "a property, a 'text', a number, TRUE or FALSE, ( or NOT"),
        ("price >", "line 1, column 8", "it ends where"),
        ("price > 10 AND", "line 1, column 15", "it ends where"),
        ("price\n> AND", "line 2, column 3", "'AND' where"),
        ("price = NULL", "line 1, column 9", "IS NULL"),
        ("price IN (a)", "line 1, column 11", "'a' where a 'text' or a number is expected"),
        ("price IN ()", "line 1, column 11", "')' where"),
        ("price LIKE 5", "line 1, column 12", "'5' where a 'text' is expected"),
        ("(price = 1", "line 1, column 11", "it ends where ), AND or OR is expected"),
        ("price == 1", "line 1, column 8", "'=' where"),
        ("price != 1", "line 1, column 7", "'!' has no meaning here"),
        ("a = 'open", "line 1, column 5", "does not end"),
        ('"open = 1', "line 1, column 1", "does not end"),
        ("a = b = c", "line 1, column 7", "AND, OR or the end"),
        ("a b", "line 1, column 3", "'b' where"),
        ("a = 1)", "line 1, column 6", "')' where AND, OR or the end is expected"),
        ("a BETWEEN 1 OR 2", "line 1, column 13", "AND is expected"),
        ("a LIKE 'x' ESCAPE 'yy'", "line 1, column 19", "one character"),
        ("a LIKE 'x!y' ESCAPE '!'", "line 1, column 11", "follow the escape"),
        ("a LIKE 'x!' ESCAPE '!'", "line 1, column 11", "must follow the escape"),
        ("price = 1e999", "line 1, column 9", "a number beyond"),
        ("'text'", "line 1, column 1", "a text where a condition is expected"),
        ("a = 1 AND 5", "line 1, column 11", "a number where a condition is expected"),
        ("a = \x00", "line 1, column 5", "has no meaning here"),
        ("NOT " * (DEPTH_MAX + 1) + "a", "line 1, column", "nested"),
        (f"a IN ({', '.join('1' * (IN_VALUES_MAX + 1))})", "line 1, column 3", "at most 256"),
    ],
)
def test_what_is_wrong_is_refused_with_its_place(expression: str, place: str, said: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        SqlFilter(expression)
    assert caught.value.field == "filter"
    assert place in caught.value.message
    assert said in caught.value.message


def test_the_length_is_bounded() -> None:
    longest = "a = 1".ljust(FILTER_CHARACTERS_MAX)
    assert SqlFilter(longest).matches(Message({"a": "1"}))
    with pytest.raises(InvalidArgument) as caught:
        SqlFilter(longest + " ")
    assert (caught.value.field, caught.value.value) == ("filter", str(FILTER_CHARACTERS_MAX + 1))


def test_parentheses_cost_no_stack() -> None:
    assert truth(f"{'(' * 2_000}count = 3{')' * 2_000}") is True


def test_keywords_are_reserved_in_any_case_and_names_may_begin_like_them() -> None:
    message = Message({"android": "1", "notes": "2", "isa.b$": "3", "größe": "4", "ıs": "5"})
    assert truth("android = 1 and notes = 2 And isa.b$ = 3 AND größe = 4 AND ıs = 5", message)
    for keyword in ("and", "Or", "NOT", "in", "is", "null", "like", "between", "escape"):
        with pytest.raises(InvalidArgument):
            SqlFilter(f"{keyword} = 1")


def test_longer_expressions_and_searches_weigh_more() -> None:
    assert SqlFilter("a = 1").weight == 1
    long = SqlFilter(" OR ".join(["a = 1"] * 400)).weight
    assert long > 10
    assert SqlFilter(f"a LIKE '%{'_' * 200}%'").weight > SqlFilter(f"a LIKE '%{'x' * 200}%'").weight


def test_filters_by_type() -> None:
    assert filters.parse("") is None
    assert isinstance(filters.parse("a || b"), frozenset)
    assert filters.parse("a = 1", filters.SQL92) is filters.parse("a = 1", filters.SQL92)
    check_filter("a || b", filters.TAG, Expressions())
    check_filter("a = 1", filters.SQL92, Expressions())
    for text, filter_type, field_name in (
        ("||", filters.TAG, "filter"),
        ("a || b", filters.SQL92, "filter"),
        ("", filters.SQL92, "filter"),
        ("a", 7, "filter_type"),
    ):
        with pytest.raises(InvalidArgument) as caught:
            check_filter(text, filter_type, Expressions())
        assert caught.value.field == field_name


def test_the_expressions_of_one_request_are_bounded() -> None:
    expressions = Expressions()
    texts = [f"a = {number} OR b = 1".ljust(FILTER_CHARACTERS_MAX) for number in range(64)]
    for text in texts * 2:
        expressions.parse(text, filters.SQL92)
    with pytest.raises(InvalidArgument) as caught:
        check_filter("c = 1", filters.SQL92, expressions)
    assert (caught.value.field, caught.value.limit) == (
        "filter",
        f"at most {filters.CHARACTERS_KEPT_MAX}",
    )
    check_filter("tags", filters.TAG, expressions)


def test_an_error_that_is_kept_is_told_again() -> None:
    errors = []
    for _ in range(2):
        with pytest.raises(InvalidArgument) as caught:
            filters.parse("a >", filters.SQL92)
        errors.append(caught.value)
    assert errors[0] is not errors[1]
    assert errors[0].message == errors[1].message


def test_a_cache_keeps_what_was_used_last_within_its_bound() -> None:
    made: list[str] = []

    def make(text: str) -> str:
        made.append(text)
        return text.upper()

    cache = TextCache(make, characters_max=3 * 65)
    for text in ("a", "b", "c", "a", "d", "a", "b"):
        assert cache.get(text) == text.upper()
    assert made == ["a", "b", "c", "d", "b"]
    assert len(cache) == 3
    cache.get("x" * 1_000)  # larger than all: kept alone
    assert len(cache) == 1
