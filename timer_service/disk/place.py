"""Which shard a data directory belongs to, and of how many: DIR/shard.

A shard's timers, and how far it has fetched, mean nothing to another one: started as another it
would leave some queues to nobody and fire what others have fired.  The number of shards may change:
queues then go from one shard to another (broker/records/timer_owners.py), and what a shard has
taken over stays with it.  Timer keys and schedules stay divided over as many shards as there were
first: only one shard may say what waits under a key, and what waits does not move.
"""

from __future__ import annotations

import json
import logging
import os
from dataclasses import dataclass, field, replace

from duemq.errors import InvalidArgument, Unavailable
from duemq.protocol import timer_keys
from duemq_server.storage import checkpoint
from duemq_server.storage.disk import Disk
from duemq_server.storage.errors import DiskFull

FILE = "shard"

log = logging.getLogger(__name__)


@dataclass
class ShardPlace:
    """A shard among the others."""

    shard: int
    shards: int
    """As it was started with.  Not more than `shard`: it leaves, and takes nothing over."""
    _path: str = field(repr=False)
    _disk: Disk = field(repr=False)
    key_shards: int = 0
    """Shards that timer keys and schedules are divided over; 0: no broker has said so yet."""
    returns: bool = False
    """It had left, and has not learnt yet what the others hold since; as far as this directory
    says, which counts where the log does not (Holds.left)."""

    @property
    def leaves(self) -> bool:
        """Whether it takes nothing over any more."""
        return self.shard >= self.shards

    def has(self, queue_id: int) -> bool:
        """Whether a queue of %TIMER% is this shard's."""
        return timer_keys.shard_of_queue(queue_id, self.shards) == self.shard

    def learn(self, key_shards: int) -> None:
        """A broker says what keys are divided over.  Raises DiskFailed.

        Where it is not noted for want of space a later start hears it again: what is here must
        fire, and make some.
        """
        if key_shards and not self.key_shards:
            self.key_shards = key_shards
            try:
                self.save()
            except DiskFull as error:
                log.warning("that keys are those of %d shards is not noted: %s", key_shards, error)

    def returned(self) -> None:
        """It holds what the others hold.  Raises DiskFull, DiskFailed."""
        replace(self, returns=False).save()
        self.returns = False

    def save(self) -> None:
        """Raises DiskFull, DiskFailed."""
        saved = {"shard": self.shard, "shards": self.shards, "key_shards": self.key_shards}
        if self.returns:
            saved["returns"] = True
        checkpoint.save(self._path, json.dumps(saved).encode(), self._disk)

    def check_key(self, topic: str, key: str) -> None:
        """Raises Unavailable unless what waits under the key waits here."""
        self._check_known()
        owner = timer_keys.shard_of(topic, key, self.key_shards)
        self._check_owner(f"timer_key {key!r} of {topic!r}", "timer_key", key, owner)

    def check_schedule(self, name: str) -> None:
        """Raises Unavailable unless the schedule of that name is this shard's."""
        self._check_known()
        owner = timer_keys.shard_of_schedule(name, self.key_shards)
        self._check_owner(f"schedule {name!r}", "name", name, owner)

    def _check_known(self) -> None:
        if not self.key_shards:
            raise Unavailable(
                "key_shards: no broker has told this new shard yet which timer keys are its own",
                field="key_shards",
            )

    def _check_owner(self, what: str, field: str, value: str, owner: int) -> None:
        if owner != self.shard:  # the caller's routes are old
            raise Unavailable(
                f"{what} belongs to shard {owner} of {self.key_shards}, this is shard {self.shard}",
                field=field,
                value=value,
            )


def not_new(shard: int, shards: int, what: str) -> str:
    """Why a shard cannot begin as `what`; empty: it can."""
    if shard < shards:
        return ""
    return (
        f"shard is {shard}, must be below shards, {shards}, for {what}: only one that has timers"
        " can leave"
    )


def check(
    directory: str, disk: Disk, shard: int, shards: int, *, may_leave: bool = False
) -> ShardPlace:
    """The place of a data directory that is this shard's, or new; then it becomes so.

    `may_leave`: also a new one may be that of a shard which leaves.

    Raises InvalidArgument if it is another shard's, or new and `shard` is none of so many;
    CorruptFile, UnknownVersion, DiskFull, DiskFailed.
    """
    disk.makedirs(directory)
    path = os.path.join(directory, FILE)
    saved = checkpoint.load(path, disk)
    if saved is None:
        reason = not_new(shard, shards, f"a new data directory, {directory}")
        if reason and not may_leave:
            raise InvalidArgument(reason, field="shard", value=shard, limit=shards - 1)
        place = ShardPlace(shard, shards, path, disk)
        place.save()
        return place
    found = json.loads(saved)
    if found["shard"] != shard:
        raise InvalidArgument(
            f"{directory} is that of shard {found['shard']}, not of shard {shard}: start it with"
            f" --shard {found['shard']}, or give this shard a data directory of its own",
            field="shard",
            value=shard,
            limit=found["shard"],
        )
    # Releases before `key_shards` never changed the number.
    returns = found.get("returns", False) or found["shards"] <= shard < shards
    place = ShardPlace(shard, shards, path, disk, found.get("key_shards", found["shards"]), returns)
    if found["shards"] != shards:
        _note(place)
    return place


def _note(place: ShardPlace) -> None:
    """Without space a later start does; that it leaves its log says before it hands over."""
    try:
        place.save()
    except DiskFull as error:
        log.warning("that it is one of %d shards now is not noted: %s", place.shards, error)
