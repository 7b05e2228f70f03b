"""What a member may not say."""

import pytest

from duemq.errors import InvalidArgument
from duemq_server.broker.groups.members import CLIENT_LENGTH_MAX, MEMBER_ID_LENGTH_MAX, Hello


def hello(**changes: object) -> Hello:
    said = {"group": "g", "member_id": "m", "subscriptions": {"t": ("", 0)}}
    return Hello(**{**said, **changes})


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("member_id", "", "member_id: 0 characters, 1 to 255 are allowed"),
        ("member_id", "x" * (MEMBER_ID_LENGTH_MAX + 1), "member_id: 256 characters"),
        ("client", "x" * (CLIENT_LENGTH_MAX + 1), "client: 1025 characters, at most 1024"),
        ("members", ("x" * 300,), "members: 300 characters in a name, at most 255"),
        (
            "session_timeout_ms",
            999,
            "session_timeout_ms: 999 is not allowed: 1000 to 300000, or 0 for the broker's own",
        ),
    ],
)
def test_a_hello_is_refused_by_a_message_that_says_it_all(
    field: str, value: object, message: str
) -> None:
    hello().check()
    with pytest.raises(InvalidArgument) as refused:
        hello(**{field: value}).check()
    assert refused.value.field == field
    assert str(refused.value).startswith(message)
