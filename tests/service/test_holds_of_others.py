"""A shard that takes queues over for the first time, or again, holds what the others hold."""

import asyncio
import itertools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from duemq.aio import Admin
from duemq.errors import PartialAnswer, Unavailable
from duemq.protocol import timer_keys
from duemq.protocol.route import LostTimer, RouteCache, TimerShard, Update
from duemq.transport import status
from duemq.v1 import (
    broker_pb2,
    schedule_pb2,
    stubs,
    timer_holds_pb2,
    timer_pb2,
)
from duemq_server.broker.records.timer_claims import Service
from duemq_server.broker.store.changes import timer_queue_changes
from duemq_server.serving.clock import now_ms, steady_ms
from duemq_server.timer_service.disk import place
from duemq_server.timer_service.edge import bulk_requests
from duemq_server.timer_service.edge.others import holds_of_others
from duemq_server.timer_service.edge.others.holds_of_others import READINGS_MAX, HoldsOfOthers
from duemq_server.timer_service.edge.others.other_shards import OtherShards
from duemq_server.timer_service.far.numbering import Numbering
from duemq_server.timer_service.scheduling.bulk.jobs import Job
from duemq_server.timer_service.scheduling.holding import changes
from duemq_server.timer_service.scheduling.holding.holds import Holds
from tests.crash.faulty_disk import FaultyDisk
from tests.property.timer_world import START_MS, World
from tests.service.running_cluster import Cluster, until
from tests.service.test_timer_keys_at_a_shard import request_of, schedule
from tests.service.test_timer_service import HOUR_MS, TOPIC
from tests.service.timer_shards import (
    QUEUES,
    Shards,
    cluster,
    comes,
    send_to,
    shards,
    stopped_long_ago,
)

__all__ = ["cluster", "shards"]


PLACE = place.check("/data", FaultyDisk(), 1, 2)


def holds_of(lost: Sequence[LostTimer]) -> HoldsOfOthers:
    """Of shard 1 of 2, which is new; nobody else is alive."""
    routes = RouteCache()
    routes.apply(Update(whole=True, lost_timers=tuple(lost)))
    shard: Any = SimpleNamespace(scheduler=SimpleNamespace(numbers=Numbering(), holds=Holds()))
    return HoldsOfOthers(shard, OtherShards(routes, "t1", PLACE), PLACE)


def test_what_is_held_is_not_known_while_the_others_are_starting_anew() -> None:
    away = LostTimer(TimerShard("t0", "127.0.0.1:1", 0, 2), since_ms=0, stopped=True)
    with pytest.raises(Unavailable, match="t0"):
        asyncio.run(holds_of([away]).adopt())


def test_who_was_this_shard_before_is_not_waited_for() -> None:
    before = LostTimer(TimerShard("lost", "127.0.0.1:1", 1, 2), since_ms=0, stopped=False)
    asyncio.run(holds_of([before]).adopt())
    asyncio.run(holds_of([]).adopt())


class Others(HoldsOfOthers):
    """One other shard, whose answers are given; each may take what happens meanwhile."""

    def __init__(self, *answers: list[timer_holds_pb2.TimerHold] | Unavailable) -> None:
        self.world = World()

        async def change(decide: Any, *, makes_room: bool) -> Any:
            return decide(self.world.scheduler, 0)

        shard: Any = SimpleNamespace(scheduler=self.world.scheduler, change=change)
        super().__init__(shard, OtherShards(routes_of("t0"), "t1", PLACE), PLACE)
        self.answers = list(answers)
        self.meanwhile = lambda: None

    async def _holds(self, shard: TimerShard, only_old: bool) -> Any:
        self.meanwhile()
        return self.answers.pop(0)

    @property
    def held(self) -> list[str]:
        return sorted(each.topic for each in self.world.scheduler.holds)


def routes_of(*names: str) -> RouteCache:
    routes = RouteCache()
    timers = tuple(TimerShard(name, "127.0.0.1:1", 0, 2) for name in names)
    routes.apply(Update(whole=True, timers=timers))
    return routes


def held(*topics: str, resuming: bool = False) -> list[timer_holds_pb2.TimerHold]:
    return [timer_holds_pb2.TimerHold(topic=each, resuming=resuming) for each in topics]


async def test_what_is_held_is_read_again_until_nothing_is_new() -> None:
    others = Others(held("a", "b"), held("b", "c"), held("b", "c"))
    await others.adopt()
    assert (others.held, others.answers) == (["b", "c"], [])
    assert not others.world.scheduler.holds.adoptions


async def test_what_is_resumed_here_while_others_answer_does_not_come_back() -> None:
    others = Others(held("a"), held("a"))
    others.meanwhile = lambda: changes.resume(others.world.scheduler, 0, "a", "")
    await others.adopt()
    assert others.held == []


async def test_what_others_are_resuming_is_not_taken_over() -> None:
    """Nothing waits here that could be dropped, and nobody would ask for its end again."""
    others = Others(held("a", resuming=True) + held("b"), held("b"))
    await others.adopt()
    assert others.held == ["b"]


async def test_who_does_not_answer_again_has_resumed_nothing() -> None:
    others = Others(held("a"), Unavailable("away"), held("a"))
    with pytest.raises(Unavailable, match="away"):
        await others.adopt()
    assert others.held == ["a"]
    await others.adopt()
    assert others.held == ["a"]
    others = Others(held("a"), Unavailable("away"), held(), held())
    with pytest.raises(Unavailable):
        await others.adopt()
    await others.adopt()
    assert others.held == []


async def test_what_nobody_tells_any_more_stays_held() -> None:
    """A nameserver that starts anew knows of nobody for a moment."""
    others = Others(held("a"))
    others.meanwhile = lambda: others._others._routes.apply(Update(whole=True))
    await others.adopt()
    assert others.held == ["a"]
    assert not others.world.scheduler.holds.adoptions


async def test_who_only_brokers_know_is_waited_for_but_not_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A nameserver that starts anew knows of nobody for a moment; who is given up, of none."""
    others = Others(held("a"), held("a"))
    routes, found = others._others._routes, others._others._routes.timers
    routes.apply(Update(whole=True))
    known = [broker_pb2.TimerService(id=8, name="t0", shard=0, shards=2)]
    others._others.holders = lambda: known
    with pytest.raises(Unavailable, match=r"while t0 \(shard 0\) is away"):
        await others.adopt()
    routes.apply(Update(whole=True, timers=found))
    await others.adopt()
    assert others.held == ["a"]

    others = Others()
    others._others._routes.apply(Update(whole=True))
    others._others.holders = lambda: known
    with pytest.raises(Unavailable):
        await others.adopt()
    monkeypatch.setattr(holds_of_others, "UNHEARD_S", 0.0)
    await others.adopt()
    assert others.held == []


async def test_who_was_this_shard_before_is_not_waited_for_though_brokers_know_it() -> None:
    others = Others()
    others._others._routes.apply(Update(whole=True))
    former = broker_pb2.TimerService(id=8, name="old", shard=1, shards=2)
    others._others.holders = lambda: [former]
    await others.adopt()


async def test_what_changes_all_the_time_is_read_again_later() -> None:
    others = Others(*([held("a"), held("b")] * (READINGS_MAX // 2)))
    with pytest.raises(Unavailable, match="changes while it is read"):
        await others.adopt()


def place_of(*shards: int) -> place.ShardPlace:
    """Of shard 1, as a directory has it that was started so, one time after the other."""
    disk = FaultyDisk()
    return [place.check("/data", disk, 1, count) for count in shards][-1]


def led_by(others: Others, where: place.ShardPlace) -> Others:
    """Another replica leads."""
    again = Others()
    again.world = others.world
    again._shard.scheduler = others.world.scheduler
    again._place = where
    return again


@pytest.mark.parametrize("checkpoint", [True, False])
async def test_that_a_shard_left_is_known_to_whoever_leads_it(
    checkpoint: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only one of the directories says so, or none: a replica may have a new disk."""

    def pass_on() -> None:
        if checkpoint:
            others.world.checkpoint()
        others.world.sync()
        others.world.kill()

    others = Others()
    monkeypatch.setattr(others.world.holds, "restarted", lambda: None)  # it knows of none
    others.world.broker.accept([START_MS], 10, "any")
    others.world.ingest(1)
    leaving = led_by(others, place_of(2, 1))
    await leaving.adopt()  # as before a message under a key
    for _ in range(2):
        await leaving.leave()
        await leaving.adopt()
        pass_on()
    back = led_by(others, place_of(2))
    back.answers = [held("a"), held("a")]
    await back.adopt()
    assert back.held == ["a"]
    pass_on()
    await led_by(others, place_of(2, 1, 2)).adopt()  # asks nobody
    pass_on()
    await led_by(others, place_of(2, 1)).leave()
    back = led_by(others, place_of(2, 1, 2))
    back.answers = [held("a", "b"), held("a", "b")]
    await back.adopt()
    assert back.held == ["a", "b"]


@pytest.mark.parametrize("full", [False, True])
async def test_a_shard_that_left_by_an_older_release_goes_by_its_directory(full: bool) -> None:
    others = Others()
    others.world.broker.accept([START_MS], 10, "any")
    others.world.ingest(1)
    where = place_of(2, 1, 2)
    where._disk.capacity_bytes = 0 if full else None  # type: ignore[attr-defined]
    back = led_by(others, where)
    back.answers = [held("a"), held("a")]
    await back.adopt()
    assert back.held == ["a"]
    assert back._place.returns == full
    await led_by(others, place_of(2, 1, 2)).adopt()  # asks nobody


async def test_a_job_that_was_noted_in_part_is_ended_and_the_others_are_noted() -> None:
    """The log was full in between."""
    others = Others(held(), held())
    scheduler = others.world.scheduler
    half, whole = (timer_pb2.ChangePendingRequest(request_id=each * 16) for each in (b"h", b"w"))
    for each in (half, whole):
        each.topic, each.cancel = "a", True
    which = bulk_requests.which_of(half)
    scheduler.bulk.open = Job(half.request_id, which, {})
    ended: list[Job] = []

    def start() -> None:
        if scheduler.bulk.open is not None:
            ended.append(scheduler.bulk.open)
            scheduler.bulk.finish(0, "")

    others._shard.bulk = SimpleNamespace(start=start)  # type: ignore[assignment]
    others.meanwhile = lambda: [others._note_job(each) for each in (half, whole)]
    with pytest.raises(Unavailable, match="under way"):
        await others.adopt()
    assert [each.id for each in ended] == [half.request_id]
    others.answers = [held()]
    await others.adopt()
    assert scheduler.bulk.find(whole.request_id) is not None
    assert scheduler.bulk.open is None


async def hands_over(cluster: Cluster, shards: Shards, timer_id: int, count: int) -> None:
    """Shard 0 starts anew as one of so many; only its broker has heard of that."""
    service = Service(timer_id, "t0", shard=0, shards=count, key_shards=1)
    its = list(range(0, QUEUES, count))
    store = cluster.brokers["b0"].store
    timer_queue_changes.claim(store, service, its, steady_ms(), now_ms=now_ms())
    await until(lambda: shards.owners() == [queue % count for queue in range(QUEUES)])


async def test_a_new_shard_waits_for_who_brokers_know_while_nameservers_know_nobody(
    cluster: Cluster, shards: Shards
) -> None:
    first = await shards.start(0, 1)
    async with Admin(cluster.nameserver) as admin:
        await until(lambda: bool(admin._client.routes.timers))
        await admin.hold_timers(TOPIC)
    its_id = first.service.shard.directory.producer_id
    await until(lambda: shards.owners() == [0] * QUEUES)
    await stopped_long_ago(cluster, shards, 0)
    new = (await shards.start(1, 2)).service
    await until(lambda: new._links.waiting == 4)
    await hands_over(cluster, shards, its_id, 2)
    link = new._links.by_name["b0"]
    await until(lambda: bool(link.fetchers or link.held_up))
    await shards.start(0, 2)
    await until(lambda: bool(link.fetchers))
    assert [each.topic for each in new.shard.scheduler.holds] == [TOPIC]


async def test_a_shard_that_comes_back_holds_what_was_held_meanwhile(
    cluster: Cluster, shards: Shards
) -> None:
    await shards.start(0, 1)
    await shards.change(2)
    handle = await send_to(cluster, 1, b"at 1", HOUR_MS)
    await until(lambda: shards.source(1, handle) is not None)
    await shards.change(1)
    await shards.stop(1)
    async with Admin(cluster.nameserver) as admin:
        await until(lambda: [each.name for each in admin._client.routes.timers] == ["t0"])
        await admin.forget("t1", timer=True)
        await admin.hold_timers(TOPIC)
        await shards.change(2)
        await until(lambda: len(admin._client.routes.timers) == 2)
        back = shards.running[1].service
        await until(lambda: bool(back._links.by_name["b0"].fetchers))
        assert len(back.shard.scheduler.holds) == 1, "not held"
        assert not back.place.returns


async def test_what_a_shard_holds_that_comes_back_fires_while_who_knows_what_is_held_is_away(
    cluster: Cluster, shards: Shards
) -> None:
    """As while it left: what it is to wait for is what it takes over."""
    first = await shards.start(0, 1)
    await shards.change(2)
    handle = await send_to(cluster, 1, b"theirs", HOUR_MS)
    await until(lambda: shards.source(1, handle) is not None)
    await shards.change(1)
    its_id = first.service.shard.directory.producer_id
    await shards.stop(0)
    await shards.start(1, 2)
    await hands_over(cluster, shards, its_id, 2)
    back = await shards.start(1, 2)
    link = back.service._links.by_name["b0"]
    await until(lambda: bool(link.held_up))
    request = timer_pb2.ChangePendingRequest(
        request_id=b"s" * 16, topic=TOPIC, shift_ms=-2 * HOUR_MS
    )
    await status.answer(back.stub.ChangePending(request))
    assert await comes(cluster, b"theirs")
    assert link.held_up
    await shards.start(0, 2)
    await until(lambda: bool(link.fetchers))


async def test_new_shards_do_not_learn_from_one_another_what_is_held(
    cluster: Cluster, shards: Shards
) -> None:
    """While the one that knows is starting anew, and brokers have what it hands over already."""
    first = await shards.start(0, 1)
    async with Admin(cluster.nameserver) as admin:
        await until(lambda: bool(admin._client.routes.timers))
        await admin.hold_timers(TOPIC)
        its_id = first.service.shard.directory.producer_id
        for number in (1, 2):
            await shards.start(number, 3)
        await until(lambda: len(admin._client.routes.timers) == 3)
        await shards.stop(0)
        await until(lambda: len(admin._client.routes.timers) == 2)
        await hands_over(cluster, shards, its_id, 3)
        await shards.start(0, 3)
        for number in (1, 2):
            new = shards.running[number].service
            await until(lambda new=new: bool(new._links.by_name["b0"].fetchers))
            assert len(new.shard.scheduler.holds) == 1, number


@pytest.mark.parametrize("what", ["key", "schedule"])
async def test_a_new_shard_takes_nothing_under_a_key_before_it_holds_what_others_hold(
    cluster: Cluster, shards: Shards, what: str
) -> None:
    """Of a fresh cluster's two the second comes while the first, which knows, is away."""
    await shards.start(0, 2)
    async with Admin(cluster.nameserver) as admin:
        await until(lambda: bool(admin._client.routes.timers))
        with pytest.raises(PartialAnswer):
            await admin.hold_timers(TOPIC)
        await shards.stop(0)
        new = await shards.start(1, 2)
        await until(lambda: bool(new.service._links.by_name["b0"].held_up))
        await until(lambda: new.service.place.key_shards == 2)
        names = (f"name-{n}" for n in itertools.count())
        if what == "key":
            key = next(each for each in names if timer_keys.shard_of(TOPIC, each, 2) == 1)

            async def come() -> None:
                await schedule(new, request_of(key))
        else:
            name = next(each for each in names if timer_keys.shard_of_schedule(each, 2) == 1)
            spec = schedule_pb2.ScheduleSpec(topic=TOPIC, every_ms=HOUR_MS)
            stub = stubs.SchedulesStub(new.connection)

            async def come() -> None:
                request = schedule_pb2.PutScheduleRequest(name=name, spec=spec)
                await status.answer(stub.PutSchedule(request))

        with pytest.raises(Unavailable, match="what is held is not known while t0"):
            await come()
        await shards.start(0, 2)
        await until(lambda: bool(new.service._links.by_name["b0"].fetchers))
        assert [each.topic for each in new.service.shard.scheduler.holds] == [TOPIC]
        await come()
        assert (await new.stats()).pending == 1


async def test_a_pause_of_this_process_is_no_waiting_for_others(monkeypatch) -> None:
    other = SimpleNamespace(name="t1", shard=1)
    others = SimpleNamespace(unheard=lambda: [other])
    here = HoldsOfOthers(None, others, SimpleNamespace(shard=0))
    loop = asyncio.get_running_loop()
    at_s = loop.time()
    found = []
    with monkeypatch.context() as patch:
        patch.setattr(loop, "time", lambda: at_s)
        for passed_s in (0.0, 1_000.0, *[1.0] * 30):
            at_s += passed_s
            found.append(bool(here._unheard()))
        others.unheard = list
        assert here._unheard() == []
        others.unheard = lambda: [other]
        assert here._unheard() == ["t1 (shard 1)"]
    waited = int(holds_of_others.UNHEARD_S - holds_of_others.LOOK_S_MAX)
    assert found == [True] * (waited + 1) + [False] * (31 - waited)
