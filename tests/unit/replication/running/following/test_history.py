from duemq_server.replication.running.following.history import (
    CHANGES_MAX,
    TOLD_MAX,
    History,
    RoleChange,
)


def test_reasons_that_take_turns_are_told_once() -> None:
    history = History()
    assert history.note(RoleChange(1, "leader", 3, ""))
    for at_ms in range(2, 2 + 2 * CHANGES_MAX, 2):
        assert history.note(RoleChange(at_ms, "joining", 3, "nobody answers")) == (at_ms == 2)
        assert history.note(RoleChange(at_ms + 1, "joining", 3, "no record")) == (at_ms == 2)
    assert [each.role for each in history.changes] == ["leader", "joining", "joining"]


def test_a_reason_that_comes_back_after_all_was_well_is_told_again() -> None:
    history = History()
    for role in ("joining", "follower", "joining", "follower"):
        assert history.note(RoleChange(1, role, 3, ""))
    assert len(history.changes) == 4


def test_what_is_remembered_is_bounded() -> None:
    history = History()
    for number in range(CHANGES_MAX + TOLD_MAX):
        assert history.note(RoleChange(number, "joining", 3, f"reason {number}"))
    assert len(history.changes) == CHANGES_MAX
    assert len(history._told) <= TOLD_MAX
