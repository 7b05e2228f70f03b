"""Where a coordinator keeps its groups: their members, and their generations.

A file, or where the log has replicas an entry of the log for each group that has changed: whoever
leads next awaits the same members, and none of them moves.
"""

import asyncio
import logging
import os
from collections.abc import Collection

from duemq.errors import DuemqError
from duemq_server.broker.edge.commits import Commits
from duemq_server.broker.groups.group_table import GroupTable
from duemq_server.broker.slices import Slices
from duemq_server.broker.store.changes import group_changes
from duemq_server.broker.store.store import Store
from duemq_server.storage import checkpoint
from duemq_server.storage.disk import Disk
from duemq_server.storage.errors import CorruptFile, StorageError, UnknownVersion

log = logging.getLogger(__name__)

GROUPS_FILE = "groups"


class GroupFile:
    """All groups in one file.

    If the disk refuses, groups go on without: fencing keeps the offsets right, the error is logged
    once, and they are saved when the disk takes them again.
    """

    def __init__(self, data_dir: str, disk: Disk) -> None:
        self._path = os.path.join(data_dir, GROUPS_FILE)
        self._disk = disk
        self._is_there = disk.exists(self._path)
        self._refused = False

    def restore(self, groups: GroupTable, now_ms: int) -> None:
        """At the start.  Raises UnknownVersion.

        Without it a broker goes on as one that the groups have just moved to, which knows nothing
        of them either: they wait for their members.
        """
        try:
            snapshot = checkpoint.load(self._path, self._disk, checkpoint.NOT_NEEDED)
        except CorruptFile as error:
            log.error("generations and members of the groups here are not known: %s", error)
            return
        if snapshot is not None:
            try:
                groups.restore(snapshot, now_ms)
            except ValueError as error:  # its bytes are what was written
                raise UnknownVersion(f"{self._path} {error}") from error

    async def save(self, groups: GroupTable) -> Collection[str]:
        """See edge.members.telling.GroupStore."""
        snapshot = await Slices().work(groups.snapshotting())
        try:
            await asyncio.to_thread(checkpoint.save, self._path, snapshot, self._disk)
        except Exception as error:
            groups.snapshot_not_kept()
            if not self._refused:
                of_disk = isinstance(error, StorageError | OSError)
                what = "the groups' generations and members could not be saved, trying on: %s"
                log.error(what, error, exc_info=not of_disk)
            self._refused = True
        else:
            if self._refused:
                log.info("the groups' generations and members are saved again")
            self._refused = False
        return ()

    async def remove(self) -> None:
        """All of it is elsewhere now."""
        if self._is_there:
            self._is_there = False
            try:
                await asyncio.to_thread(self._unlink)
            except (StorageError, OSError) as error:
                log.error("%s stays for now: %s", self._path, error)

    def _unlink(self) -> None:
        self._disk.unlink(self._path)
        self._disk.fsync_dir(os.path.dirname(self._path))


class GroupLog:
    """An entry a group that has changed.

    What is not committed is told to nobody: another replica may lead by now, and its generations
    bear the same mark.  So while too few replicas are in sync, queues stay where they are.
    """

    def __init__(self, store: Store, commits: Commits, data_dir: str, disk: Disk) -> None:
        self._store = store
        self._commits = commits
        self._file = GroupFile(data_dir, disk)  # from before the log had replicas

    def restore(self, groups: GroupTable, now_ms: int) -> None:
        """At the start.  Raises as that of GroupFile, where nothing is in the log."""
        memberships = self._store.tables.memberships
        if memberships:
            groups.take_over(memberships, now_ms)
        else:
            self._file.restore(groups, now_ms)

    async def save(self, groups: GroupTable) -> Collection[str]:
        """See edge.members.telling.GroupStore."""
        slices = Slices()
        changes = await slices.work(groups.changing())
        settled, refused = 0, dict[str, Exception]()
        for group, kept in changes.items():
            try:
                settled = group_changes.put_membership(self._store, group, kept)
            except (DuemqError, ValueError) as error:  # no room, or an entry would be too large
                refused[group] = error
            await slices.pause()
        await self._commits.wait(settled)
        if refused:
            first = next(iter(refused.items()))
            log.error("%d groups could not be saved: %s: %s", len(refused), *first)
            groups.not_kept(refused)
        else:
            await self._file.remove()
        return refused
