"""SQL filters beside SQLite, which knows three-valued logic, and against whatever is thrown in."""

import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from duemq.errors import InvalidArgument
from duemq_server.broker.filtering.like import Pattern
from duemq_server.broker.filtering.sql_filter import SqlFilter

# Columns of known type, each twice so that properties compare with one another.
NUMBERS, TEXTS, BOOLEANS = ("n", "m"), ("s", "t"), ("b", "c")
LETTERS = "ab%_'é"


@dataclass
class Message:
    properties: dict[str, str]
    tag: str = ""
    key: str = ""


numbers = st.one_of(st.integers(-20, 20), st.integers(-40, 40).map(lambda n: n / 4))
# No text is a number: two such properties would compare as numbers.
texts = st.text(LETTERS, max_size=4)
rows = st.fixed_dictionaries(
    {},
    optional={
        **dict.fromkeys(NUMBERS, numbers),
        **dict.fromkeys(TEXTS, texts),
        **dict.fromkeys(BOOLEANS, st.booleans()),
    },
)


def quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


number_terms = st.one_of(st.sampled_from(NUMBERS), numbers.map(str))
text_terms = st.one_of(st.sampled_from(TEXTS), texts.map(quoted))
boolean_terms = st.one_of(st.sampled_from(BOOLEANS), st.sampled_from(["TRUE", "FALSE"]))
operators = st.sampled_from(["=", "<>", ">", ">=", "<", "<="])
maybe_not = st.sampled_from(["", "NOT "])


def joined(*parts: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.tuples(*parts).map(" ".join)


def escaped(pattern: str) -> str:
    """A pattern in which the escape only stands before what it may."""
    return pattern.replace("é", "!%").replace("a", "!_")


def listed(values: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.lists(values, min_size=1, max_size=4).map(lambda each: f"({', '.join(each)})")


conditions_of_values = st.one_of(
    joined(number_terms, operators, number_terms),
    joined(text_terms, operators, text_terms),
    joined(boolean_terms, st.sampled_from(["=", "<>"]), boolean_terms),
    joined(number_terms, maybe_not, st.just("BETWEEN"), number_terms, st.just("AND"), number_terms),
    joined(text_terms, maybe_not, st.just("BETWEEN"), text_terms, st.just("AND"), text_terms),
    joined(number_terms, maybe_not, st.just("IN"), listed(numbers.map(str))),
    joined(text_terms, maybe_not, st.just("IN"), listed(texts.map(quoted))),
    joined(text_terms, maybe_not, st.just("LIKE"), texts.map(quoted)),
    joined(
        text_terms,
        maybe_not,
        st.just("LIKE"),
        texts.map(escaped).map(quoted),
        st.just("ESCAPE '!'"),
    ),
    joined(
        st.sampled_from(NUMBERS + TEXTS + BOOLEANS), st.sampled_from(["IS NULL", "IS NOT NULL"])
    ),
    boolean_terms,
)
conditions = st.recursive(
    conditions_of_values,
    lambda inner: st.one_of(
        joined(st.just("NOT ("), inner, st.just(")")),
        joined(inner, st.sampled_from(["AND", "OR"]), inner),
        joined(st.just("("), inner, st.sampled_from([") AND (", ") OR ("]), inner, st.just(")")),
        joined(st.just("("), inner, st.just(") = ("), inner, st.just(")")),
    ),
    max_leaves=8,
)


@pytest.fixture(scope="module")
def database() -> Iterator[sqlite3.Connection]:
    connection = sqlite3.connect(":memory:")
    connection.execute("PRAGMA case_sensitive_like = ON")
    connection.execute(
        "CREATE TABLE m (n NUMERIC, m NUMERIC, s TEXT, t TEXT, b BOOLEAN, c BOOLEAN)"
    )
    yield connection
    connection.close()


def in_sqlite(database: sqlite3.Connection, condition: str, row: dict) -> bool | None:
    database.execute("DELETE FROM m")
    columns = NUMBERS + TEXTS + BOOLEANS
    database.execute("INSERT INTO m VALUES (?,?,?,?,?,?)", [row.get(name) for name in columns])
    [(value,)] = database.execute(f"SELECT ({condition}) FROM m")
    return None if value is None else bool(value)


def in_filter(condition: str, row: dict) -> bool | None:
    message = Message({name: str(value) for name, value in row.items()})
    if SqlFilter(condition).matches(message):
        return True
    return False if SqlFilter(f"NOT ({condition})").matches(message) else None


@given(conditions, rows)
@example("n BETWEEN m AND 3", {"n": 4})
@example("s NOT IN ('a') OR b", {"b": False})
def test_a_condition_is_what_sqlite_says(
    database: sqlite3.Connection, condition: str, row: dict
) -> None:
    assert in_filter(condition, row) is in_sqlite(database, condition, row)


@given(texts, st.text("ab%_é", max_size=6))
def test_like_is_what_a_naive_matcher_says(text: str, pattern: str) -> None:
    def naive(text: str, pattern: str) -> bool:
        if not pattern:
            return not text
        if pattern[0] == "%":
            return any(naive(text[at:], pattern[1:]) for at in range(len(text) + 1))
        return bool(text) and pattern[0] in ("_", text[0]) and naive(text[1:], pattern[1:])

    assert Pattern(pattern).matches(text) is naive(text, pattern)


def compiled(text: str) -> SqlFilter | InvalidArgument:
    try:
        return SqlFilter(text)
    except InvalidArgument as error:
        return error


TOKENS = [
    "AND", "OR", "NOT", "IN", "IS", "NULL", "LIKE", "BETWEEN", "ESCAPE", "TRUE", "FALSE",
    "(", ")", ",", "=", "<>", "<", ">=", "+", "-", "'", '"', "''", "'a'", "'%_'", "'!'", "1", "2.5",
    "1e3", "a", "TAGS", "KEYS", "\n", "\x00", "é", "$x", ".", "*", "||", ";", "--", "/*",
]  # fmt: skip


@given(
    st.one_of(st.text(max_size=60), st.lists(st.sampled_from(TOKENS), max_size=40).map(" ".join))
)
def test_whatever_comes_is_an_expression_or_refused_with_its_place(text: str) -> None:
    made = compiled(text)
    if isinstance(made, InvalidArgument):
        assert made.field == "filter"
        assert "line " in made.message
        return
    for message in (Message({}), Message({"a": "1"}, "t", "k"), Message({"a": "x" * 50})):
        assert made.matches(message) in (True, False)


@given(
    conditions, st.dictionaries(st.sampled_from(NUMBERS + TEXTS + BOOLEANS), st.text(max_size=8))
)
def test_any_values_have_an_answer(condition: str, properties: dict[str, str]) -> None:
    straight, opposite = SqlFilter(condition), SqlFilter(f"NOT ({condition})")
    message = Message(properties)
    assert not (straight.matches(message) and opposite.matches(message))
