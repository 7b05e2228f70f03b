"""SQL filters of subscriptions.  Pure."""

from dataclasses import dataclass

from duemq.protocol import checks
from duemq.protocol.limits import FILTER_CHARACTERS_MAX

# Numbers of duemq.v1.FilterType.
TAG, SQL92 = 0, 1


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
            raise checks.wrong("filter", self.expression, "an SQL filter as text")
        checks.length("filter", self.expression, 0, FILTER_CHARACTERS_MAX)
        checks.filled("filter", self.expression.strip())

    def __str__(self) -> str:
        return self.expression
