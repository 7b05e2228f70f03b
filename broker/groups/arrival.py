"""A member comes into its group, or comes back: who may, and what is its own.  Pure.

    may it?     check_incarnation ──► misfits, or check_fits
    held back?  was_elsewhere
    its own     keep_back, if it replaces a process ──► await_members ──► drop_unowned, if it was
                here ──► claim ──► incarnate

What the words mean, and the rules, stand in coordinator.py, which calls all of it.
"""

from duemq.errors import FencedMember, InvalidArgument, Overloaded
from duemq_server.broker.groups.members import (
    MEMBERS_MAX,
    Group,
    Hello,
    Holding,
    Member,
    Replaced,
    check_agree,
)
from duemq_server.broker.store.offsets import GENERATION_MARKS

# Of a group: static member ids whose last incarnation is remembered, present or not.
INCARNATIONS_MAX = 2 * MEMBERS_MAX


def check_incarnation(group: Group, hello: Hello) -> None:
    """Raises FencedMember to a static member that a newer process replaced."""
    newest = group.incarnations.get(hello.member_id, 0)
    if hello.incarnation < newest:
        raise FencedMember(
            f"member {hello.member_id!r} of group {group.name!r} is another process now,"
            " started later",
            field="incarnation",
            value=hello.incarnation,
            limit=newest,
        )


def misfits(group: Group, hello: Hello, now_ms: int) -> dict[str, InvalidArgument]:
    """Newcomers that do not agree with the first of the former members to come back, and why."""
    others = _others(group, hello)
    if now_ms >= group.young_until_ms or not hello.generation:
        return {}
    if any(other.was_member for other in others):
        return {}
    found: dict[str, InvalidArgument] = {}
    for other in others:
        try:
            check_agree(group.name, other, hello)
        except InvalidArgument as error:
            found[other.member_id] = error
    return found


def check_fits(group: Group, hello: Hello) -> None:
    """Raises InvalidArgument to one that reads something else, Overloaded if the group is full."""
    others = _others(group, hello)
    if others:
        check_agree(group.name, hello, others[0])  # who agree with one another
    if len(others) >= MEMBERS_MAX:
        raise Overloaded(
            f"group {group.name!r} is full",
            field="members",
            value=str(len(others) + 1),
            limit=str(MEMBERS_MAX),
        )


def _others(group: Group, hello: Hello) -> list[Member]:
    return [m for m in group.members.values() if m.member_id != hello.member_id]


def was_elsewhere(group: Group, hello: Hello, known_generation: int) -> bool:
    """Another coordinator may have had this group meanwhile, which is known here.

    Who names nobody else has nobody to wait for.  A reset counts a fence on by one.
    """
    if max(hello.generation, known_generation) > group.generation + GENERATION_MARKS:
        return True
    others = set(hello.members) - {hello.member_id}
    return not group.members and hello.generation > 0 and bool(others)


def keep_back(group: Group, before: Member, now_ms: int) -> None:
    """What a replaced process has is nobody's until it has heard of that, or its session is over.

    Till then it may begin callbacks.
    """
    until_ms = before.last_heard_ms + before.session_timeout_ms
    if until_ms <= now_ms:
        return
    process = Replaced(before.member_id, before.incarnation, until_ms)
    for queue in group.all_held_by({before.member_id}):
        del group.holdings[queue]
        group.replaced[queue] = process


def await_members(group: Group, hello: Hello, known_generation: int) -> None:
    """While holding back: everyone that anybody names is still to come, but for who has left.

    The others may not have heard of a goodbye that came before they did.  Who does not know of a
    newer taker may have been a member no more by then, and not know of others either.
    """
    is_newest = known_generation <= hello.generation + GENERATION_MARKS
    if group.hold_until_ms is not None and hello.members and is_newest:
        awaited = dict(group.absent or {})
        for member in hello.members:
            settled = member in group.members or member in group.left
            if not settled and len(awaited) < MEMBERS_MAX:
                awaited[member] = group.members[hello.member_id].session_timeout_ms
        group.absent = awaited
    if group.absent is not None:
        group.absent.pop(hello.member_id, None)


def drop_unowned(group: Group, hello: Hello) -> None:
    """What a member that came back does not have: its release, or our grant, was lost."""
    owned = set(hello.owned)
    for queue in group.all_held_by({hello.member_id}):
        if queue not in owned:
            del group.holdings[queue]


def claim(group: Group, hello: Hello) -> None:
    """Takes a member's word for what it holds, as far as it does not take from others."""
    if group.hold_until_ms is not None:
        for queue in hello.owned:
            other = group.holdings.get(queue)
            if other is None or other.claimed < hello.generation:
                group.holdings[queue] = Holding(hello.member_id, hello.generation, hello.generation)


def incarnate(group: Group, hello: Hello) -> bool:
    """A static member's new process gets what the old one had under a new generation.

    False: it is the same process.
    """
    if hello.incarnation == group.incarnations.get(hello.member_id, 0):
        return False
    group.outdated = True
    group.incarnations.pop(hello.member_id, None)
    group.incarnations[hello.member_id] = hello.incarnation
    if len(group.incarnations) > INCARNATIONS_MAX:
        gone = (each for each in group.incarnations if each not in group.members)
        del group.incarnations[next(gone)]
    return True
