"""The grammar of SQL filters: from text to a tree.  Pure.

LALR(1): the time is linear in the expression, and nesting costs no stack.  Keywords are told from
property names here and not in the grammar, so that they may be written in any case and each is
reserved everywhere.  What the tree means is sql_filter.py's.
"""

from dataclasses import dataclass, field
from typing import TypeAlias

from lark import Lark, Token, Transformer, v_args
from lark.exceptions import UnexpectedCharacters, UnexpectedInput, UnexpectedToken

from duemq.errors import InvalidArgument
from duemq.protocol import checks
from duemq.protocol.limits import FILTER_CHARACTERS_MAX
from duemq_server.broker.filtering.sql_numbers import number_of

# NOT, AND, OR within each other; parentheses alone do not count.
DEPTH_MAX = 64
IN_VALUES_MAX = 256

GRAMMAR = r"""
?condition: conjunction
    | conjunction (_OR conjunction)+          -> any_of
?conjunction: negation
    | negation (_AND negation)+               -> all_of
?negation: comparison
    | NOT negation                            -> negated
?comparison: operand
    | operand OPERATOR operand                -> compared
    | operand IS [NOT] _NULL                  -> is_null
    | operand [NOT] BETWEEN operand _AND operand            -> between
    | operand [NOT] IN _OPEN value (_COMMA value)* _CLOSE   -> among
    | operand [NOT] LIKE TEXT [_ESCAPE TEXT]                -> like
?operand: value
    | PROPERTY                                -> named
    | QUOTED                                  -> quoted
    | BOOLEAN                                 -> boolean
    | _OPEN condition _CLOSE
?value: TEXT                                  -> text
    | [SIGN] NUMBER                           -> number

OPERATOR: "=" | "<>" | ">=" | ">" | "<=" | "<"
SIGN: "+" | "-"
NUMBER: /([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?/
TEXT: /'[^']*+(?:''[^']*+)*+'/
QUOTED: /"[^"]*+(?:""[^"]*+)*+"/
PROPERTY: /[^\W\d][\w.$]*|\$[\w.$]*/
_OPEN: "("
_CLOSE: ")"
_COMMA: ","
%declare NOT BOOLEAN IS BETWEEN IN LIKE _AND _OR _NULL _ESCAPE
%ignore /\s+/
"""

KEYWORDS = {
    "NOT": "NOT",
    "TRUE": "BOOLEAN",
    "FALSE": "BOOLEAN",
    "IS": "IS",
    "BETWEEN": "BETWEEN",
    "IN": "IN",
    "LIKE": "LIKE",
    "AND": "_AND",
    "OR": "_OR",
    "NULL": "_NULL",
    "ESCAPE": "_ESCAPE",
}
# What people read instead of the names of terminals, in this order; empty: said by another.
SHOWN = {
    "PROPERTY": "a property",
    "QUOTED": "",
    "TEXT": "a 'text'",
    "NUMBER": "a number",
    "SIGN": "",
    "BOOLEAN": "TRUE or FALSE",
    "OPERATOR": "= <> > >= < <=",
    "_OPEN": "(",
    "_CLOSE": ")",
    "_COMMA": ",",
    "NOT": "NOT",
    "_AND": "AND",
    "_OR": "OR",
    "IS": "IS",
    "_NULL": "NULL",
    "BETWEEN": "BETWEEN",
    "IN": "IN",
    "LIKE": "LIKE",
    "_ESCAPE": "ESCAPE",
    "$END": "the end",
}
SHOWN_CHARACTERS_MAX = 40


@dataclass(frozen=True, slots=True)
class _Node:
    place: int
    """Character of the expression, from 0, for errors."""
    depth: int = field(default=0, kw_only=True)
    """Conditions within conditions."""


@dataclass(frozen=True, slots=True)
class Property(_Node):
    """A property of the message; TAGS and KEYS, unless quoted, are its tag and key."""

    name: str
    quoted: bool


@dataclass(frozen=True, slots=True)
class Constant(_Node):
    """A text, a number, TRUE or FALSE."""

    value: str | int | float | bool


@dataclass(frozen=True, slots=True)
class Not(_Node):
    """Also what NOT BETWEEN, NOT IN, NOT LIKE and IS NOT NULL are made of."""

    inner: "Node"


@dataclass(frozen=True, slots=True)
class AnyOf(_Node):
    """OR."""

    parts: "tuple[Node, ...]"


@dataclass(frozen=True, slots=True)
class AllOf(_Node):
    """AND."""

    parts: "tuple[Node, ...]"


@dataclass(frozen=True, slots=True)
class Compared(_Node):
    """`operator` is one of = <> > >= < <=."""

    operator: str
    left: "Node"
    right: "Node"


@dataclass(frozen=True, slots=True)
class IsNull(_Node):
    """IS NULL."""

    operand: "Node"


@dataclass(frozen=True, slots=True)
class Between(_Node):
    """Both ends belong to it."""

    operand: "Node"
    low: "Node"
    high: "Node"


@dataclass(frozen=True, slots=True)
class Among(_Node):
    """IN."""

    operand: "Node"
    values: tuple[Constant, ...]


@dataclass(frozen=True, slots=True)
class Like(_Node):
    """`pattern_place` is that of the pattern's opening quote."""

    operand: "Node"
    pattern: str
    escape: str | None
    pattern_place: int


Node: TypeAlias = (
    Property | Constant | Not | AnyOf | AllOf | Compared | IsNull | Between | Among | Like
)


class _WrongError(Exception):
    """What is no syntax error, at a place."""

    def __init__(self, place: int, what: str) -> None:
        super().__init__(place, what)
        self.place = place
        self.what = what


@v_args(inline=True)
class _Tree(Transformer[Token, Node]):
    """Called by the parser as it recognizes each rule."""

    def any_of(self, *parts: Node) -> Node:
        return AnyOf(parts[0].place, parts, depth=_deeper(*parts))

    def all_of(self, *parts: Node) -> Node:
        return AllOf(parts[0].place, parts, depth=_deeper(*parts))

    def negated(self, negation: Token, inner: Node) -> Node:
        return Not(_place(negation), inner, depth=_deeper(inner))

    def compared(self, left: Node, operator: Token, right: Node) -> Node:
        depth = _deeper(left, right)
        return Compared(_place(operator), str(operator), left, right, depth=depth)

    def is_null(self, operand: Node, word: Token, negation: Token | None) -> Node:
        return _unless(negation, IsNull(_place(word), operand, depth=_deeper(operand)))

    def between(
        self, operand: Node, negation: Token | None, word: Token, low: Node, high: Node
    ) -> Node:
        depth = _deeper(operand, low, high)
        return _unless(negation, Between(_place(word), operand, low, high, depth=depth))

    def among(self, operand: Node, negation: Token | None, word: Token, *values: Constant) -> Node:
        if len(values) > IN_VALUES_MAX:
            what = f"{len(values)} values in IN, at most {IN_VALUES_MAX} are allowed"
            raise _WrongError(_place(word), what)
        return _unless(negation, Among(_place(word), operand, values, depth=_deeper(operand)))

    def like(
        self,
        operand: Node,
        negation: Token | None,
        word: Token,
        pattern: Token,
        escape: Token | None,
    ) -> Node:
        by = None if escape is None else _unquoted(escape)
        if escape is not None and len(by or "") != 1:
            raise _WrongError(_place(escape), "ESCAPE takes one character")
        like = Like(
            _place(word),
            operand,
            _unquoted(pattern),
            by,
            _place(pattern),
            depth=_deeper(operand),
        )
        return _unless(negation, like)

    def named(self, name: Token) -> Node:
        return Property(_place(name), str(name), False)

    def quoted(self, name: Token) -> Node:
        return Property(_place(name), _unquoted(name), True)

    def boolean(self, word: Token) -> Node:
        return Constant(_place(word), word.upper() == "TRUE")

    def text(self, token: Token) -> Node:
        return Constant(_place(token), _unquoted(token))

    def number(self, sign: Token | None, token: Token) -> Node:
        value = number_of(f"{sign or ''}{token}")
        if value is None:
            raise _WrongError(_place(token), "a number beyond what is compared")
        return Constant(_place(sign or token), value)


def _unless(negation: Token | None, node: Node) -> Node:
    return node if negation is None else Not(node.place, node, depth=_deeper(node))


def _deeper(*nodes: Node) -> int:
    deepest = max(nodes, key=lambda node: node.depth)
    if deepest.depth >= DEPTH_MAX:
        raise _WrongError(deepest.place, f"conditions are nested more than {DEPTH_MAX} deep")
    return deepest.depth + 1


def _place(token: Token) -> int:
    return token.start_pos or 0


def _unquoted(token: Token) -> str:
    quote = token[0]
    return token[1:-1].replace(quote * 2, quote)


def _keyword_or_property(token: Token) -> Token:
    kind = KEYWORDS.get(token.upper()) if token.isascii() else None
    return token if kind is None else Token.new_borrow_pos(kind, token, token)


_parser = Lark(
    GRAMMAR,
    start="condition",
    parser="lalr",
    lexer="basic",
    transformer=_Tree(),
    lexer_callbacks={"PROPERTY": _keyword_or_property},
    maybe_placeholders=True,
)


def parse(text: str) -> Node:
    """The tree of an expression.  Raises InvalidArgument that says where it is wrong."""
    checks.length("filter", text, 0, FILTER_CHARACTERS_MAX)
    try:
        return _parser.parse(text)  # type: ignore[return-value]  # the transformer's, not a Tree
    except UnexpectedInput as error:
        raise _refused(text, error) from None
    except _WrongError as error:
        raise wrong(text, error.place, error.what) from None


def wrong(text: str, place: int, what: str) -> InvalidArgument:
    """The error of an expression that is wrong at character `place` (from 0)."""
    line = text.count("\n", 0, place) + 1
    column = place - text.rfind("\n", 0, place)
    return InvalidArgument(
        f"filter: line {line}, column {column}: {what}",
        field="filter",
        value=text[:100],
        limit="SQL-92 as in broker/README.md",
    )


def _refused(text: str, error: UnexpectedInput) -> InvalidArgument:
    if isinstance(error, UnexpectedCharacters):
        place = error.pos_in_stream or 0
        if text[place] in "'\"":
            return wrong(text, place, f"what begins here with {text[place]} does not end")
        return wrong(text, place, f"{text[place]!r} has no meaning here")
    assert isinstance(error, UnexpectedToken)
    if error.token.type == "$END":
        return wrong(text, len(text), f"it ends where {_expected(text)} is expected")
    place = _place(error.token)
    hint = "; compare with IS NULL" if error.token.type == "_NULL" else ""
    found = str(error.token)[:SHOWN_CHARACTERS_MAX]
    what = f"{found!r} where {_expected(text[:place])} is expected{hint}"
    return wrong(text, place, what)


def _expected(beginning: str) -> str:
    """What can follow a beginning without a fault."""
    # The error's own list is of the parser's state after it had made room for the wrong token.
    parser = _parser.parse_interactive(beginning)
    parser.exhaust_lexer()
    wanted = parser.accepts()
    names = [shown for name, shown in SHOWN.items() if name in wanted and shown]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} or {names[-1]}"
