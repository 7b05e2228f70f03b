"""Groups: their settings, their end, and what their coordinator keeps of them: the decisions.

Owned and run by: the event loop.  Each is an entry of the log, as in timer_queue_changes.py.
"""

from duemq.errors import GroupNotFound
from duemq.protocol import names
from duemq_server.broker.store import group_configs, journal
from duemq_server.broker.store.group_configs import GroupConfig
from duemq_server.broker.store.store import Store


def knows(store: Store, group: str) -> bool:
    """Whether the group was put, or has offsets here."""
    return group in store.groups or group in store.offsets or group == names.TIMER_GROUP


def check_known(store: Store, group: str) -> None:
    """Raises GroupNotFound for an unknown group where groups must be put first."""
    if not (store.settings.auto_create_groups or knows(store, group)):
        raise group_configs.not_found(group)


def put(store: Store, config: GroupConfig) -> int:
    """Settled.  Raises InvalidArgument, ReadOnly, Overloaded."""
    store.check_writable()
    store.groups.check(config)
    _, settled = store.append(journal.GROUP_PUT, [journal.group_put(config)])
    store.groups.put(config)
    return settled


def delete(store: Store, group: str) -> int:
    """Forgets a group's settings and offsets and deletes its retry topic.

    Settled.  Raises GroupNotFound, InvalidArgument, ReadOnly, Overloaded.
    """
    names.check_own_group(group)
    if not knows(store, group):
        raise GroupNotFound(f"group: {group!r} is not here", field="group", value=group)
    store.check_changeable()
    _, settled = store.append(journal.GROUP_DELETED, [journal.group_deleted(group)])
    store.tables.remove_group(group)
    store.sent_back.forget(group)
    store.dead_letters.forget(group)
    store.on_report()
    return settled


def put_membership(store: Store, group: str, kept: str | None) -> int:
    """Keeps what a coordinator knows of a group; None: it has the group no more.

    Settled.  Raises ReadOnly, Overloaded, Internal.
    """
    if store.tables.memberships.get(group) == kept:
        return store.log.end_position  # it may still be on its way to the disk
    _, settled = store.append(journal.MEMBERSHIP, [journal.membership(group, kept)])
    store.tables.put_membership(group, kept)
    return settled
