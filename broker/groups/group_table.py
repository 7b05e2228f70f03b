"""The groups that a coordinator has, and what of them is still to be kept for a restart.  Pure.

Owned by: Coordinator, which says what has changed (`note`).  What is kept of each is told in
group_snapshot.py, and where in group_store.py.
"""

import json
from collections.abc import Iterable, Iterator, Mapping

from duemq.errors import GroupNotFound, Overloaded
from duemq.protocol.pieces import Pieces, finish
from duemq_server.broker.groups import group_snapshot
from duemq_server.broker.groups.members import Group

# Raised when an older broker must not read a snapshot; what is only added has a default instead.
SNAPSHOT_VERSION = 1
DROPPED_MAX = 1_000  # groups that are not here any more, remembered for their generations


class GroupTable:
    """See the module."""

    def __init__(self, groups_max: int) -> None:
        self._groups_max = groups_max
        self._groups: dict[str, Group] = {}
        self._dropped: dict[str, int] = {}  # the last groups that were, and their generations
        # Groups that the snapshot holds otherwise than they are, and what it holds of each.
        self._changed: set[str] = set()
        self._kept: dict[str, bytes] = {}
        self._snapshot_lost = False

    def __iter__(self) -> Iterator[Group]:
        """The groups as they are now: they may be dropped meanwhile."""
        return iter(list(self._groups.values()))

    def find(self, name: str) -> Group | None:
        """Answers a group; None: it is not here."""
        return self._groups.get(name)

    def get(self, name: str) -> Group:
        """Answers a group.  Raises GroupNotFound."""
        try:
            return self._groups[name]
        except KeyError:
            raise GroupNotFound(f"no group {name!r} here", field="group", value=name) from None

    def make(self, name: str, now_ms: int) -> Group:
        """Answers a new group, without members.  Raises Overloaded if there is no room."""
        if len(self._groups) >= self._groups_max:
            self._make_room(name)
        generation = self._dropped.pop(name, 0)
        group = self._groups[name] = Group(name, generation=generation, empty_since_ms=now_ms)
        return group

    def drop(self, group: Group) -> None:
        """Its generation is remembered: it may be made anew before the clock has passed it."""
        del self._groups[group.name]
        self._changed.add(group.name)
        self._dropped[group.name] = group.generation
        if len(self._dropped) > DROPPED_MAX:
            del self._dropped[next(iter(self._dropped))]

    def _make_room(self, name: str) -> None:
        """Drops the group that is without members for longest: a client may make up any number."""
        empty = [group for group in self._groups.values() if not group.members and not group.absent]
        if not empty:
            raise Overloaded(
                f"group: {name!r} is one too many, {len(self._groups)} groups have members here",
                field="group",
                value=name,
                limit=self._groups_max,
            )
        self.drop(min(empty, key=lambda group: group.empty_since_ms))

    # --- restart ------------------------------------------------------------------------------

    def note(self, name: str) -> None:
        """What is kept of this group has changed."""
        self._changed.add(name)

    @property
    def changed(self) -> bool:
        """The snapshot differs from the last one taken."""
        return bool(self._changed) or self._snapshot_lost

    def snapshot(self) -> bytes:
        """As `snapshotting`, at once."""
        return finish(self.snapshotting())

    def snapshotting(self) -> Pieces[bytes]:
        """Answers what must survive a restart: generations and members (JSON).

        Only groups that have changed since the last one are encoded anew.
        """
        changes = yield from self.changing()
        for name, kept in changes.items():
            if kept is None:
                self._kept.pop(name, None)
            else:
                self._kept[name] = f"{json.dumps(name)}: {kept}".encode()
        self._snapshot_lost = False
        groups = b", ".join(self._kept.values())
        return b'{"version": %d, "groups": {%s}}' % (SNAPSHOT_VERSION, groups)

    def snapshot_not_kept(self) -> None:
        """The last one could not be kept: another one is due, though nothing else has changed."""
        self._snapshot_lost = True

    def changing(self) -> Pieces[dict[str, str | None]]:
        """Answers what must survive of each group that was `changed`; None: it is gone.

        Each as it is now or later; one that changes in between is `changed` again.
        """
        changed, self._changed = self._changed, set()
        changes: dict[str, str | None] = {}
        for name in changed:
            group = self._groups.get(name)
            changes[name] = (yield from group_snapshot.encoding(group)) if group else None
            yield
        return changes

    def not_kept(self, groups: Iterable[str]) -> None:
        """What `changing` answered of these could not be kept: they are `changed` still."""
        self._changed.update(groups)

    def restore(self, snapshot: bytes, now_ms: int) -> None:
        """Takes a snapshot over, at start.  Raises ValueError for one of another version."""
        state = json.loads(snapshot)
        if (version := state.get("version")) != SNAPSHOT_VERSION:
            raise ValueError(f"has version {version!r}, this release reads {SNAPSHOT_VERSION}")
        for name, kept in state["groups"].items():
            self._groups[name] = group_snapshot.decode(name, kept, now_ms)
            self._changed.add(name)

    def take_over(self, memberships: Mapping[str, str], now_ms: int) -> None:
        """As `restore`, of groups that were kept one by one, and still are (`changing`)."""
        for name, kept in memberships.items():
            self._groups[name] = group_snapshot.decode(name, json.loads(kept), now_ms)
