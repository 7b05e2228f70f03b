"""What a file of permissions gives to whom."""

import pytest

from duemq.errors import InvalidArgument
from duemq_server.serving.permissions import rights
from duemq_server.serving.permissions.rights import EVERY, Action, Need, parse

CLUSTER = """
[[allow]]
names = ["cluster"]
service = true
"""


def allows(text: str, *asked: tuple[str, Action, str]) -> list[bool]:
    policy = parse(CLUSTER + text)
    return [policy.allows((who,), Need(action, name)) for who, action, name in asked]


SHOP = """
[[allow]]
names = ["shop", "spiffe://shop"]
send = ["orders", "invoices.*"]
receive = ["replies"]
groups = ["shop*"]
schedules = ["shop-*"]
"""


@pytest.mark.parametrize(
    ("action", "name", "may"),
    [
        (Action.SEND, "orders", True),
        (Action.SEND, "orders2", False),
        (Action.SEND, "order", False),
        (Action.SEND, "invoices.eu", True),
        (Action.SEND, "invoices", False),
        (Action.SEND, "replies", False),
        (Action.SEND, "%RETRY%shop", False),
        (Action.SEND, EVERY, False),
        (Action.RECEIVE, "replies", True),
        (Action.RECEIVE, "orders", False),
        (Action.RECEIVE, "%RETRY%shop-1", True),
        (Action.RECEIVE, "%DLQ%shop", True),
        (Action.RECEIVE, "%DLQ%billing", False),
        (Action.RECEIVE, "%TIMER%", False),
        (Action.SEE, "orders", True),
        (Action.SEE, "replies", True),
        (Action.SEE, "payments", False),
        (Action.JOIN, "shop-2", True),
        (Action.JOIN, "billing", False),
        (Action.SCHEDULE, "shop-nightly", True),
        (Action.SCHEDULE, EVERY, False),
        (Action.KNOW, "", True),
        (Action.ADMINISTER, "", False),
        (Action.SERVE, "", False),
    ],
)
@pytest.mark.parametrize("who", ["shop", "spiffe://shop"])
def test_each_right_is_for_what_it_names(who, action, name, may):
    assert allows(SHOP, (who, action, name)) == [may]


@pytest.mark.parametrize("action", list(Action))
def test_who_is_in_no_entry_may_do_nothing(action):
    assert allows(SHOP, ("stranger", action, "orders"), ("", action, "orders")) == [False, False]
    assert not parse(CLUSTER + SHOP).allows((), Need(action, "orders"))


@pytest.mark.parametrize("action", list(Action))
def test_the_cluster_may_do_all_and_an_administrator_all_but_be_it(action):
    text = '[[allow]]\nnames = ["alice"]\nadmin = true\n'
    for name in ("orders", "%TIMER%", EVERY):
        assert allows(text, ("cluster", action, name)) == [True]
        assert allows(text, ("alice", action, name)) == [action is not Action.SERVE]


def test_a_star_is_all_but_the_systems_topics():
    text = '[[allow]]\nnames = ["spy"]\nreceive = ["*"]\nsend = ["%TRACE%"]\ngroups = ["*"]\n'
    assert allows(
        text,
        ("spy", Action.RECEIVE, "orders"),
        ("spy", Action.RECEIVE, EVERY),
        ("spy", Action.RECEIVE, "%TIMER%"),
        ("spy", Action.RECEIVE, "%TRACE%"),
        ("spy", Action.SEND, "%TRACE%"),
        ("spy", Action.JOIN, "%TIMER%"),
    ) == [True, True, False, False, True, False]


def test_rights_of_all_names_and_entries_add_up():
    text = """
    [[allow]]
    names = ["a"]
    send = ["one"]
    [[allow]]
    names = ["a", "b"]
    send = ["two"]
    [[allow]]
    names = ["*"]
    send = ["three"]
    """
    policy = parse(CLUSTER + text)

    def sends(*names: str) -> list[str]:
        return [
            topic
            for topic in ("one", "two", "three")
            if policy.allows(names, Need(Action.SEND, topic))
        ]

    assert sends("a") == ["one", "two", "three"]
    assert sends("b") == ["two", "three"]
    assert sends("stranger") == ["three"]
    assert sends("stranger", "b") == ["two", "three"]
    assert sends() == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[[allow", "permissions: "),
        ("deny = []", "'deny'"),
        ("[allow]\nnames = []", "two brackets"),
        ("allow = 3", "two brackets"),
        ("", "service"),
        (CLUSTER + "[[allow]]\nsend = ['a']", "entry 2: names"),
        (CLUSTER + "[[allow]]\nnames = []", "entry 2: names"),
        (CLUSTER + "[[allow]]\nnames = ['a']\nsends = ['a']", "entry 2: 'sends'"),
        (CLUSTER + "[[allow]]\nnames = ['a']\nsend = 'a'", "entry 2: send"),
        (CLUSTER + "[[allow]]\nnames = ['a']\nsend = ['a*b']", "'a\\*b'"),
        (CLUSTER + "[[allow]]\nnames = ['a']\nsend = ['']", "entry 2: send"),
        (CLUSTER + "[[allow]]\nnames = ['a']\nadmin = 'yes'", "entry 2: admin"),
        (CLUSTER + "[[allow]]\nnames = ['shop-*']\nsend = ['a']", "a whole name"),
        (CLUSTER + "[[allow]]\nnames = ['*.example.org']\nsend = ['a']", "a whole name"),
        (CLUSTER + "[[allow]]\nnames = ['*']\nadmin = true", "entry 2: names"),
        (CLUSTER + "[[allow]]\nnames = ['*']\nservice = true", "entry 2: names"),
    ],
)
def test_what_is_wrong_is_named(text, said):
    with pytest.raises(InvalidArgument, match=said) as caught:
        parse(text)
    assert caught.value.field.startswith("permissions")


def test_made_up_names_do_not_fill_the_memory(monkeypatch):
    monkeypatch.setattr(rights, "ANSWERS_MAX", 3)
    policy = parse(CLUSTER + SHOP)
    for number in range(10):
        assert not policy.allows(("shop",), Need(Action.SEND, f"made-up-{number}"))
        assert policy.allows(("shop",), Need(Action.SEND, "orders"))
        assert len(policy._answers) <= 3
    policy.allows(("shop",), Need(Action.SEND, "o" * 10_000))
    assert all(len(need.name) < 300 for _, need in policy._answers)
