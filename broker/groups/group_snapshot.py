"""What a coordinator keeps of a group over a restart, as JSON.  Pure.

    {"generation": …, "strategy": …, "members": {member id: session timeout in ms, …},
     "incarnations": {static member id: newest incarnation, …},
     "reads_since_ms": {topic: since when it is read, …},
     "shares": {member id: [[topic, broker, queue id], …], …}}

`shares` only for strategies that look at what they answered last.
"""

import json
from collections.abc import Iterable
from typing import Any

from duemq.protocol.balance import MessageQueue
from duemq.protocol.pieces import Pieces, parts
from duemq_server.broker.groups.members import Group


def decode(name: str, kept: dict[str, Any], now_ms: int) -> Group:
    """The group, whose members are awaited for as long as their sessions may last."""
    members: dict[str, int] = kept["members"]
    awaited_until_ms = now_ms + max(members.values(), default=0)
    return Group(
        name,
        strategy=kept["strategy"],
        generation=kept["generation"],
        absent=dict(members),
        hold_until_ms=awaited_until_ms if members else None,
        young_until_ms=awaited_until_ms,
        empty_since_ms=now_ms,
        incarnations=dict(kept.get("incarnations", {})),
        # Not later than now: the clock may have been ahead at the start before.
        reads_since_ms={
            topic: min(since_ms, now_ms)
            for topic, since_ms in kept.get("reads_since_ms", {}).items()
        },
        allocated={
            MessageQueue(*queue): member
            for member, share in kept.get("shares", {}).items()
            for queue in share
        },
    )


def encoding(group: Group) -> Pieces[str]:
    """Answers the group as it is now, whatever becomes of it between the pieces."""
    head = json.dumps(
        {
            "generation": group.generation,
            "strategy": group.strategy,
            "members": {
                **(group.absent or {}),
                **{m.member_id: m.session_timeout_ms for m in group.members.values()},
            },
            "incarnations": group.incarnations,
            "reads_since_ms": group.reads_since_ms,
        }
    )
    shares = yield from group.shares()
    lists = []
    for member_id, share in shares.items():
        encoded = yield from _list(share)
        lists.append(f"{json.dumps(member_id)}: {encoded}")
    return f'{head[:-1]}, "shares": {{{", ".join(lists)}}}}}'


def _list(queues: Iterable[MessageQueue]) -> Pieces[str]:
    encoded = []
    for part in parts(queues):
        encoded.append(json.dumps(part)[1:-1])
        yield
    return f"[{', '.join(encoded)}]"
