"""However often the number of timer shards changes: each message is taken over by one of them.

Once, whatever is killed when, and whosever disk is full for a while; and the others know that they
do not have it.
"""

from __future__ import annotations

import struct
from contextlib import suppress

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from duemq.errors import FencedTimer, ReadOnly
from duemq.protocol.names import TIMER_TOPIC
from duemq_server.broker.reading import reader
from duemq_server.broker.records.timer_claims import NOT_KNOWN, Service
from duemq_server.broker.store import recovery
from duemq_server.broker.store.changes import timer_queue_changes
from duemq_server.broker.store.store import Store
from duemq_server.broker.store.store_settings import StoreSettings
from duemq_server.storage.errors import DiskFull, LogFull
from duemq_server.timer_service.disk import place
from duemq_server.timer_service.disk.data_directory import DataDirectory, open_directory
from duemq_server.timer_service.disk.housekeeping import Save
from duemq_server.timer_service.disk.place import ShardPlace
from duemq_server.timer_service.scheduling.cancelling import outcome_of_gone
from duemq_server.timer_service.timers.log_entries import Cancelled, SourceId
from tests.crash.faulty_disk import FaultyDisk
from tests.property.timer_world import LIMITS
from tests.unit.broker.batches import batch

DATA = "/data"
NOW_MS = 1_700_000_000_000
QUEUES = 4  # of %TIMER%; what is due in an hour waits in the first two
SHARDS = 3  # at most
STORE_ID = 7
BROKER = "b"
HOUR_MS = 3_600_000
FETCH_BYTES = 300  # a frame or two
STORE = StoreSettings(default_queues=2, timer_queues=QUEUES)


class OneShard:
    """A shard and its links, as broker_link.py and timer_fetcher.py drive it."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.disk = FaultyDisk()
        self.disk.makedirs(DATA)
        self.place: ShardPlace
        self.directory: DataDirectory
        self.begins: dict[int, int] = {}  # of granted queues
        self.is_full = False  # its disk

    def start(self, shards: int) -> None:
        self.begins = {}
        self.place = place.check(DATA, self.disk, self.number, shards)
        for folder in ("log", "segments"):
            self.disk.makedirs(f"{DATA}/{folder}")
        self.directory = open_directory(DATA, self.disk, LIMITS, NOW_MS)

    def kill(self, shards: int) -> None:
        self.disk = self.disk.after_kill()
        if self.is_full:  # what a start gives back somebody else takes
            self.disk.capacity_bytes = 0
        self.start(shards)

    def fill(self, left_bytes: int) -> None:
        self.is_full = True
        self.disk.capacity_bytes = self.disk.used_bytes() + left_bytes
        self.directory.log.disk_full = not left_bytes

    def free(self) -> None:
        self.is_full = False
        self.disk.capacity_bytes = None
        self.directory.log.disk_full = False

    def sync(self) -> None:
        with suppress(DiskFull):
            while self.directory.log.write_pending():
                pass
        self.directory.scheduler.durable(self.directory.log.durable_position)

    def source(self, queue_id: int):
        return self.directory.scheduler.numbers.source(SourceId(STORE_ID, queue_id))

    def claim(self, store: Store) -> None:
        self.sync()
        found = [self.source(queue) for queue in range(QUEUES) if not self.place.has(queue)]
        sources = [each for each in found if each is not None]
        if any(each.durable_offset < each.next_offset for each in sources):
            return  # until there is space
        ends = {each.id.queue_id: each.next_offset for each in sources}
        wanted = [queue for queue in range(QUEUES) if self.place.has(queue)]
        key_shards = self.place.key_shards or NOT_KNOWN
        producer_id = self.directory.producer_id
        empty = self.directory.scheduler.ledger.empty
        service = Service(
            producer_id, f"t{self.number}", self.number, self.place.shards, key_shards, empty
        )
        try:
            decision, settled = timer_queue_changes.claim(
                store, service, wanted, NOW_MS, ends, now_ms=NOW_MS
            )
        except ReadOnly:
            return
        settle(store)
        if store.log.durable_position < settled:  # an answer is durable
            return
        self.place.learn(store.timer_owners.key_shards)
        self.begins |= {
            queue: store.timer_owners.begin_of(queue)
            for queue in decision.granted
            if queue not in self.begins
        }

    def fetch(self, store: Store, queue_id: int) -> None:
        if queue_id not in self.begins:
            return
        begin, source = self.begins[queue_id], self.source(queue_id)
        offset = max(begin, source.next_offset if source is not None else 0)
        if self.directory.housekeeper.short_of_space():
            return
        with suppress(FencedTimer, LogFull, DiskFull):
            store.timer_owners.check(queue_id, self.directory.producer_id, NOW_MS)
            queue = store.queue(TIMER_TOPIC, queue_id)
            if offset >= queue.max_offset:
                return
            found = reader.read_frames(store.log, queue, offset, FETCH_BYTES)
            timer_queue_changes.check_fetch(store, queue_id, offset)
            timer_queue_changes.note_fetched(store, queue_id, found.next_offset)
            data = b"".join(found.slices)
            self.directory.scheduler.ingest(
                SourceId(STORE_ID, queue_id), BROKER, data, NOW_MS, offset, begin
            )


def settle(store: Store) -> None:
    with suppress(DiskFull):
        while store.log.write_pending():
            pass
    store.durable(store.log.durable_position)


class ChangingShards(RuleBasedStateMachine):
    """Rules are what operators, networks and power supplies do."""

    @initialize(first=st.integers(1, SHARDS))
    def start(self, first: int) -> None:
        self.first = self.shards = first
        self.disk = FaultyDisk()
        self.store = self._opened()
        self.running: list[OneShard] = []
        self.sent = 0
        self._add()
        for each in self.running:
            each.claim(self.store)

    def _opened(self) -> Store:
        store = recovery.open_store(DATA, self.disk, STORE, segment_bytes=1 << 20).store
        settle(store)
        return store

    def _add(self) -> None:
        for number in range(len(self.running), self.shards):
            self.running.append(OneShard(number))
            self.running[-1].start(self.shards)

    @rule(count=st.integers(1, 3), queue=st.sampled_from([-1, 1, 1]))
    def send(self, count: int, queue: int) -> None:
        if self.disk.capacity_bytes is not None:
            return
        due = struct.pack(f"<{count}q", *([HOUR_MS] * count))
        bodies = [b"%d" % (self.sent + n) for n in range(count)]
        self.sent += count
        made = batch(bodies, queue_id=queue, delays_ms=due, producer_id=self.sent)
        self.store.send(made, NOW_MS)
        settle(self.store)

    @rule(shards=st.integers(1, SHARDS))
    def the_number_changes(self, shards: int) -> None:
        """Nobody but who is new knows yet."""
        self.shards = shards
        self._add()

    @rule(which=st.integers(0, SHARDS - 1), dies=st.booleans(), knows=st.booleans())
    def a_shard_starts_anew(self, which: int, dies: bool, knows: bool) -> None:
        each = self.running[which % len(self.running)]
        shards = self.shards if knows else each.place.shards
        if dies:
            each.kill(shards)
        else:
            each.sync()
            each.start(shards)

    @rule(rounds=st.integers(1, 3), knowing=st.sets(st.integers(0, SHARDS - 1)))
    def all_work(self, rounds: int, knowing: set[int]) -> None:
        """Those that are named start anew first, with the number as it is now."""
        for each in self.running:
            if each.number in knowing:
                each.kill(self.shards)
        for _ in range(rounds):
            for each in self.running:
                each.claim(self.store)
                for queue in range(QUEUES):
                    each.fetch(self.store, queue)

    @rule(shards=st.integers(1, SHARDS), count=st.integers(0, 2))
    def the_number_changes_and_all_know(self, shards: int, count: int) -> None:
        self.the_number_changes(shards)
        self.all_work(2, set(range(SHARDS)))
        if count:
            self.send(count, 1)
        self.all_work(1, set())

    @rule(which=st.integers(0, SHARDS - 1))
    def a_shard_claims(self, which: int) -> None:
        self.running[which % len(self.running)].claim(self.store)

    @rule(which=st.integers(0, SHARDS - 1), queue=st.integers(0, QUEUES - 1))
    def a_shard_fetches(self, which: int, queue: int) -> None:
        self.running[which % len(self.running)].fetch(self.store, queue)

    @rule(which=st.integers(0, SHARDS - 1), saves=st.booleans())
    def a_shard_syncs(self, which: int, saves: bool) -> None:
        each = self.running[which % len(self.running)]
        each.sync()
        if saves:
            job = each.directory.housekeeper.next_job(NOW_MS + HOUR_MS)
            if isinstance(job, Save) and job.position <= each.directory.log.durable_position:
                try:
                    job.run()
                except DiskFull:
                    each.directory.housekeeper.no_space(job, NOW_MS)
                else:
                    each.directory.housekeeper.finish(job, NOW_MS)

    @rule(which=st.integers(0, SHARDS - 1), left=st.sampled_from([0, 500, 3_000]))
    def a_disk_is_full(self, which: int, left: int) -> None:
        self.running[which % len(self.running)].fill(left)

    @rule(which=st.integers(0, SHARDS - 1))
    def it_has_space_again(self, which: int) -> None:
        self.running[which % len(self.running)].free()

    @rule(left=st.sampled_from([0, 100, 500]))
    def the_brokers_disk_is_full(self, left: int) -> None:
        self.disk.capacity_bytes = self.disk.used_bytes() + left
        self.store.log.disk_full = not left

    @rule()
    def the_broker_has_space_again(self) -> None:
        self.disk.capacity_bytes = None
        self.store.log.disk_full = False
        settle(self.store)

    @rule()
    def the_broker_dies(self) -> None:
        full = self.disk.capacity_bytes is not None
        self.disk = self.disk.after_kill()
        self.disk.capacity_bytes = self.disk.used_bytes() if full else None
        self.store = self._opened()

    @invariant()
    def nobody_has_what_another_one_has(self) -> None:
        if not hasattr(self, "running"):
            return
        for queue in range(QUEUES):
            for offset in range(self.store.queue(TIMER_TOPIC, queue).max_offset):
                assert len(self._who_has(queue, offset)) <= 1

    @invariant()
    def the_broker_knows_who_holds_timers(self) -> None:
        if not hasattr(self, "running"):
            return
        known = {each.id for each in self.store.timer_owners.holders()}
        for each in self.running:
            if each.directory.scheduler.ledger.pending:
                assert each.directory.producer_id in known

    def _who_has(self, queue: int, offset: int) -> list[int]:
        sources = ((each.number, each.source(queue)) for each in self.running)
        return [number for number, source in sources if source is not None and source.had(offset)]

    def teardown(self) -> None:
        """All of them know the number by then: all is taken over, and who has it says so."""
        if not hasattr(self, "running"):
            return
        self.the_broker_has_space_again()
        for each in self.running:
            each.free()
            each.kill(self.shards)
        for _ in range(2):
            for each in self.running:
                each.claim(self.store)
        for each in self.running:
            assert each.place.key_shards == self.first
            for queue in range(QUEUES):
                for _ in range(self.sent + 1):
                    each.fetch(self.store, queue)
        pending = sum(each.directory.scheduler.ledger.pending for each in self.running)
        assert pending == self.sent
        for queue in range(QUEUES):
            for offset in range(self.store.queue(TIMER_TOPIC, queue).max_offset):
                [owner] = self._who_has(queue, offset)
                self._check_others_know(queue, offset, owner)

    def _check_others_know(self, queue: int, offset: int, owner: int) -> None:
        """What they never had they do not call fired, however long ago it was due."""
        for each in self.running:
            numbers = each.directory.scheduler.numbers
            number = numbers.find_source(SourceId(STORE_ID, queue))
            if each.number == owner or number is None:
                continue
            handle = Cancelled(SourceId(STORE_ID, queue), offset, NOW_MS)
            if offset < numbers.sources[number].next_offset:
                scheduler = each.directory.scheduler
                assert outcome_of_gone(scheduler, number, handle, NOW_MS + 1) == "UNKNOWN"


ChangingShards.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestChangingShards = ChangingShards.TestCase
