"""SQL filters of subscriptions.  Pure."""

from dataclasses import dataclass

from duemq.errors import InvalidArgument

EXPRESSION_CHARACTERS_MAX = 4_096


@dataclass(frozen=True, slots=True)
class Sql:
    """A filter in SQL-92, for where a filter's text goes.

        PushConsumer("eu", {"orders": Sql("price > 10 AND region IN ('eu', 'uk')")}, callback)

    Names are those of message properties; TAGS and KEYS are the message's tag and key.  Brokers
    evaluate it, and are exact; they refuse what is no expression, naming line and column.
    """

    expression: str

    def __post_init__(self) -> None:
        """Raises InvalidArgument if the expression is no text, blank or too long."""
        if not isinstance(self.expression, str):
            raise InvalidArgument(
                "an SQL filter is text", field="filter", value=self.expression, limit="str"
            )
        if not self.expression.strip() or len(self.expression) > EXPRESSION_CHARACTERS_MAX:
            limit = f"1 to {EXPRESSION_CHARACTERS_MAX} characters"
            raise InvalidArgument(
                f"an SQL filter has {limit}",
                field="filter",
                value=len(self.expression),
                limit=limit,
            )

    def __str__(self) -> str:
        return self.expression
