"""SQL filters: an expression, compiled once, asked of each message.  Pure.

The rules are in README.md, "SQL filters".  A compiled expression is closures over a *row*: the
values of just those properties that the expression names.  A condition is True, False or None,
SQL's unknown; only True is a match.  What has no answer is unknown: a property that is not set, and
values whose types do not fit (`'abc' > 5`).  So a wrong type never matches, under NOT neither.

Types are known when an expression is compiled, but for properties: they are text that may be taken
for a number or a boolean, by what they are compared with.
"""

import enum
import operator
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol, TypeAlias

from duemq_server.broker.filtering import like
from duemq_server.broker.filtering.sql_grammar import (
    AllOf,
    Among,
    AnyOf,
    Between,
    Compared,
    Constant,
    IsNull,
    Like,
    Node,
    Not,
    Property,
    parse,
    wrong,
)
from duemq_server.broker.filtering.sql_numbers import number_of

# An expression of so many characters is a short one.
SHORT_CHARACTERS = 256
# What LIKE compares at each place of a text costs as much as so many characters of an expression.
SEARCH_WEIGHT = 16

Row: TypeAlias = list[str | None]
Evaluate: TypeAlias = Callable[[Row], Any]
Convert: TypeAlias = Callable[[Any], Any]
Compare: TypeAlias = Callable[[Any, Any], bool | None]

# Places in a row.
_TAG, _KEY, _FIRST_PROPERTY = 0, 1, 2
_FIELDS = {"TAGS": _TAG, "KEYS": _KEY}
_BOOLEANS = {"true": True, "false": False}
_OPERATORS: Mapping[str, Compare] = {
    "=": operator.eq,
    "<>": operator.ne,
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
}
_MIRRORED = {"=": "=", "<>": "<>", ">": "<", ">=": "<=", "<": ">", "<=": ">="}


class Fields(Protocol):
    """What a filter may ask of a message.  An empty tag or key is none."""

    @property
    def properties(self) -> Mapping[str, str]:
        """By name."""
        ...

    @property
    def tag(self) -> str:
        """For TAGS."""
        ...

    @property
    def key(self) -> str:
        """For KEYS."""
        ...


class SqlFilter:
    """A compiled expression.  Immutable; any thread."""

    __slots__ = ("_condition", "_fields", "_names", "text", "weight")

    def __init__(self, text: str) -> None:
        """Raises InvalidArgument that says where the expression is wrong."""
        compiler = _Compiler(text)
        self._condition = compiler.condition(parse(text))
        self._names = tuple(compiler.names)
        self._fields = compiler.fields
        self.text = text
        cost = len(text) + SEARCH_WEIGHT * compiler.search_characters
        self.weight = 1 + cost // SHORT_CHARACTERS
        """How many times longer than with a short expression a message may take."""

    def matches(self, message: Fields) -> bool:
        """Tells whether the expression is true of a message."""
        row: Row = [None, None, *map(message.properties.get, self._names)]
        if self._fields:
            row[_TAG], row[_KEY] = message.tag or None, message.key or None
        return self._condition(row) is True


class Kind(enum.Enum):
    """What is known of a value before there is a message."""

    PROPERTY = "a property"
    TEXT = "a text"
    NUMBER = "a number"
    BOOLEAN = "a condition"


class _Term(NamedTuple):
    """A compiled part of an expression."""

    kind: Kind
    evaluate: Evaluate
    constant: str | int | float | bool | None = None
    """Its value, where that is known."""


class _Compiler:
    """One compilation; collects what the row must hold."""

    def __init__(self, text: str) -> None:
        self.names: list[str] = []
        self.fields = False
        self.search_characters = 0
        self._text = text

    def condition(self, node: Node) -> Evaluate:
        """Of a tree that must be a condition; a property is one if it says true or false."""
        term = self._term(node)
        if term.kind is Kind.PROPERTY:
            return _converted(term.evaluate, _boolean_of)
        if term.kind is not Kind.BOOLEAN:
            what = f"{term.kind.value} where a condition is expected"
            raise wrong(self._text, node.place, what)
        return term.evaluate

    def _term(self, node: Node) -> _Term:
        match node:
            case Property():
                return _Term(Kind.PROPERTY, operator.itemgetter(self._place(node)))
            case Constant():
                return _constant(node.value)
            case _:
                return _Term(Kind.BOOLEAN, self._test(node))

    def _test(self, node: Node) -> Evaluate:
        match node:
            case Not():
                return _negation(self.condition(node.inner))
            case AnyOf():
                return _any_of([self.condition(part) for part in node.parts])
            case AllOf():
                return _all_of([self.condition(part) for part in node.parts])
            case Compared():
                return _comparison(node.operator, self._term(node.left), self._term(node.right))
            case IsNull():
                return _is_null(self._term(node.operand).evaluate)
            case Between():
                return _between(*map(self._term, (node.operand, node.low, node.high)))
            case Among():
                return _among(self._term(node.operand), [each.value for each in node.values])
            case Like():
                return self._like(node)
        raise TypeError(node)

    def _place(self, node: Property) -> int:
        """Where the row has a property."""
        if not node.quoted and node.name in _FIELDS:
            self.fields = True
            return _FIELDS[node.name]
        if node.name not in self.names:
            self.names.append(node.name)
        return _FIRST_PROPERTY + self.names.index(node.name)

    def _like(self, node: Like) -> Evaluate:
        try:
            pattern = like.Pattern(node.pattern, node.escape)
        except like.WrongPatternError as error:
            raise wrong(self._text, node.pattern_place + 1 + error.place, error.expected) from None
        self.search_characters += like.search_characters(node.pattern)
        operand = self._term(node.operand)
        if operand.kind in (Kind.NUMBER, Kind.BOOLEAN):
            return _never
        return _converted(operand.evaluate, pattern.matches)


def _constant(value: str | int | float | bool) -> _Term:
    if isinstance(value, bool):
        kind = Kind.BOOLEAN
    else:
        kind = Kind.TEXT if isinstance(value, str) else Kind.NUMBER
    return _Term(kind, lambda row: value, value)


def _boolean_of(text: str) -> bool | None:
    return _BOOLEANS.get(text.lower())


def _never(*values: Any) -> None:
    """The types do not fit."""


def _converted(evaluate: Evaluate, convert: Convert) -> Evaluate:
    def converted(row: Row) -> Any:
        value = evaluate(row)
        return None if value is None else convert(value)

    return converted


# --- conditions of conditions ---------------------------------------------------------------------


def _negation(condition: Evaluate) -> Evaluate:
    def negation(row: Row) -> bool | None:
        value = condition(row)
        return None if value is None else not value

    return negation


def _any_of(conditions: list[Evaluate]) -> Evaluate:
    def any_of(row: Row) -> bool | None:
        result: bool | None = False
        for condition in conditions:
            value = condition(row)
            if value:
                return True
            if value is None:
                result = None
        return result

    return any_of


def _all_of(conditions: list[Evaluate]) -> Evaluate:
    def all_of(row: Row) -> bool | None:
        result: bool | None = True
        for condition in conditions:
            value = condition(row)
            if value is None:
                result = None
            elif not value:
                return False
        return result

    return all_of


# --- conditions of values -------------------------------------------------------------------------


def _is_null(evaluate: Evaluate) -> Evaluate:
    return lambda row: evaluate(row) is None


def _comparison(name: str, left: _Term, right: _Term) -> Evaluate:
    if left.constant is not None and right.constant is None:
        return _comparison(_MIRRORED[name], right, left)
    if right.constant is not None and left.kind is Kind.PROPERTY:
        return _with_constant(name, left.evaluate, right.kind, right.constant)
    compare = _compare(name, left.kind, right.kind)
    first, second = left.evaluate, right.evaluate

    def comparison(row: Row) -> bool | None:
        one, other = first(row), second(row)
        return None if one is None or other is None else compare(one, other)

    return comparison


def _with_constant(name: str, evaluate: Evaluate, kind: Kind, constant: Any) -> Evaluate:
    """The usual case, without a detour: a property and what is known."""
    test, convert = _OPERATORS[name], _conversion(kind)
    if not _has(name, kind):
        return _never

    def of_text(row: Row) -> bool | None:
        value = evaluate(row)
        return None if value is None else test(value, constant)

    def converted(row: Row) -> bool | None:
        value = evaluate(row)
        if value is None or (value := convert(value)) is None:
            return None
        return test(value, constant)

    return of_text if kind is Kind.TEXT else converted


def _compare(name: str, left: Kind, right: Kind) -> Compare:
    """How values of two kinds compare."""
    test = _OPERATORS[name]
    if left is right:
        if left is Kind.PROPERTY:
            return lambda one, other: test(*_alike(one, other))
        return test if _has(name, left) else _never
    if Kind.PROPERTY not in (left, right):
        return _never
    kind = right if left is Kind.PROPERTY else left
    if not _has(name, kind):
        return _never
    convert = _conversion(kind)

    def compare(one: Any, other: Any) -> bool | None:
        if left is Kind.PROPERTY:
            one = convert(one)
        else:
            other = convert(other)
        return None if one is None or other is None else test(one, other)

    return compare


def _has(name: str, kind: Kind) -> bool:
    """TRUE and FALSE have no order."""
    return kind is not Kind.BOOLEAN or name in ("=", "<>")


def _conversion(kind: Kind) -> Convert:
    """What a property's text is taken for beside a value of this kind; None: that is none."""
    if kind is Kind.NUMBER:
        return number_of
    return _boolean_of if kind is Kind.BOOLEAN else str


def _alike(one: str, other: str) -> tuple[Any, Any]:
    """Two properties: numbers if both are, else texts."""
    numbers = number_of(one), number_of(other)
    return (one, other) if None in numbers else numbers


def _between(operand: _Term, low: _Term, high: _Term) -> Evaluate:
    """As `operand >= low AND operand <= high`, with the operand evaluated once."""
    value, least, most = operand.evaluate, low.evaluate, high.evaluate
    known = low.constant is not None and high.constant is not None
    alike = low.kind is high.kind and low.kind is not Kind.BOOLEAN
    if known and alike and operand.kind is Kind.PROPERTY:
        return _within(value, low.kind, low.constant, high.constant)
    above = _compare(">=", operand.kind, low.kind)
    below = _compare("<=", operand.kind, high.kind)

    def between(row: Row) -> bool | None:
        one = value(row)
        if one is None:
            return None
        bottom, top = least(row), most(row)
        is_above = None if bottom is None else above(one, bottom)
        is_below = None if top is None else below(one, top)
        if is_above is False or is_below is False:
            return False
        return None if is_above is None or is_below is None else True

    return between


def _within(evaluate: Evaluate, kind: Kind, bottom: Any, top: Any) -> Evaluate:
    """The usual BETWEEN: a property and what is known, taken for a number once."""
    convert = _conversion(kind)

    def within(row: Row) -> bool | None:
        value = evaluate(row)
        if value is None or (value := convert(value)) is None:
            return None
        return bottom <= value <= top

    return within


def _among(operand: _Term, values: list[Any]) -> Evaluate:
    """As `operand = value OR …`."""
    texts = frozenset(value for value in values if isinstance(value, str))
    numbers = frozenset(value for value in values if not isinstance(value, str))
    evaluate, kind = operand.evaluate, operand.kind
    wrong_type = {Kind.TEXT: bool(numbers), Kind.NUMBER: bool(texts), Kind.BOOLEAN: True}

    def among(row: Row) -> bool | None:
        value = evaluate(row)
        if value is None:
            return None
        if kind is not Kind.PROPERTY:
            found = kind is not Kind.BOOLEAN and (value in texts or value in numbers)
            return True if found else None if wrong_type[kind] else False
        if value in texts:
            return True
        if not numbers:
            return False
        number = number_of(value)
        return None if number is None else number in numbers

    return among
