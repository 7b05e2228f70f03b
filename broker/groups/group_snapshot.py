"""What a coordinator keeps of a group over a restart, as JSON.  Pure.

    {"generation": …, "strategy": …, "members": {member id: session timeout in ms, …},
     "incarnations": {static member id: newest incarnation, …},
     "shares": {member id: [[topic, broker, queue id], …], …}}

`shares` only for strategies that look at what they answered last.
"""

import json
from collections.abc import Iterable

from duemq.protocol.balance import MessageQueue
from duemq.protocol.pieces import Pieces, parts
from duemq_server.broker.groups.members import Group


def encoding(group: Group) -> Pieces[bytes]:
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
        }
    )
    shares = yield from group.shares()
    lists = []
    for member_id, share in shares.items():
        encoded = yield from _list(share)
        lists.append(f"{json.dumps(member_id)}: {encoded}")
    return f'{head[:-1]}, "shares": {{{", ".join(lists)}}}}}'.encode()


def _list(queues: Iterable[MessageQueue]) -> Pieces[str]:
    encoded = []
    for part in parts(queues):
        encoded.append(json.dumps(part)[1:-1])
        yield
    return f"[{', '.join(encoded)}]"
