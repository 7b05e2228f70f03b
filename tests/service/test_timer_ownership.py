"""Which timer service serves a shard: claims, refusals, a lost data directory, brokers' clocks."""

import asyncio
import json
import logging
import re
import shutil
import time
from collections.abc import AsyncIterator, Iterable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result

from duemq.aio import Admin
from duemq.errors import ErrorCode, FencedTimer, InvalidArgument
from duemq.transport import status
from duemq.v1 import (
    admin_pb2,
    broker_pb2,
    stubs,
    timer_admin_pb2,
    timer_pb2,
)
from duemq_cli.app import cli
from duemq_cli.exits import Exit
from duemq_server.broker import process as broker_process
from duemq_server.broker.records import timer_owners
from duemq_server.storage.disk import RealDisk
from duemq_server.storage.tools.set_aside import set_aside
from duemq_server.timer_service import firing
from duemq_server.timer_service import process as timer_process
from duemq_server.timer_service.edge import broker_link, broker_links, fire_stream
from duemq_server.timer_service.scheduling import fire_lane
from duemq_server.timer_service.timers.log_entries import SourceId
from tests.service.running_broker import batch
from tests.service.running_cluster import Cluster, running_cluster, until
from tests.service.test_timer_service import (
    TOPIC,
    Shard,
    bodies_of,
    delivered,
    running_shard,
    send,
)

HOUR_MS = 3_600_000


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    async with running_cluster(tmp_path, "b0") as running:
        await running.create_topic(TOPIC, queues=2)
        yield running


async def has_come(cluster: Cluster, count: int) -> bool:
    """What is stored is shown when its time comes, which may be after its acknowledgement."""
    return len(bodies_of(await delivered(cluster))) == count


def refused(shard: Shard) -> list[str]:
    return sorted(shard.service._links.refusals)


def granted(shard: Shard) -> bool:
    return shard.service._links.granted


async def test_the_second_service_of_a_shard_is_refused_and_nothing_comes_twice(
    cluster: Cluster, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with running_shard(cluster, tmp_path, name="t0") as first:
        await until(lambda: granted(first))
        async with running_shard(cluster, tmp_path, name="t1") as second:
            await until(lambda: refused(second) == ["b0"])
            [handle, *_] = await send(cluster, [b"a", b"b"], [HOUR_MS, 0])
            await send(cluster, [b"c"], [20])
            await first.until(lambda stats: stats.fired == 2 and not stats.in_flight)

            assert bodies_of(await delivered(cluster)) == [b"b", b"c"]
            stats = await second.stats()
            assert stats.accepted == 0
            assert "t0 (shard 0 of 1" in stats.problems[0]
            [result] = await second.cancel(handle)  # which asks who has it
            assert result.outcome == timer_pb2.CANCELLED
            handle.offset += 99
            [result] = await second.cancel(handle)
            assert result.error.code == ErrorCode.UNAVAILABLE
            assert "t0" in result.error.message
            timers = cluster.brokers["b0"]._routes.cache.timers
            assert [timer.name for timer in timers] in ([], ["t0"])
    errors = [x for x in caplog.records if x.levelno == logging.ERROR and "t0" in x.getMessage()]
    assert len(errors) == 1  # and not one a try


async def test_of_two_that_start_at_once_one_gets_all(cluster: Cluster, tmp_path: Path) -> None:
    await cluster.start_broker("b1")
    await cluster.start_broker("b2")
    async with (
        running_shard(cluster, tmp_path, name="t0") as one,
        running_shard(cluster, tmp_path, name="t1") as other,
    ):

        def all_granted() -> list[Shard]:
            found = (one, other)
            return [
                x for x in found if sum(y.granted for y in x.service._links.by_name.values()) == 3
            ]

        await until(lambda: len(all_granted()) == 1 and bool(refused(one) or refused(other)))
        [winner] = all_granted()
        loser = other if winner is one else one
        assert not refused(winner)
        assert not granted(loser)


async def owners(cluster: Cluster) -> tuple[stubs.TimerAdminStub, list]:
    stub = stubs.TimerAdminStub(cluster.clients["b0"].connection)
    answer = await stub.ListTimerOwners(timer_admin_pb2.ListTimerOwnersRequest())
    return stub, list(answer.queues)


async def test_a_lost_data_directory_is_said_and_can_be_given_up(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timer_owners, "ALIVE_MS", HOUR_MS)
    async with running_shard(cluster, tmp_path) as shard:
        await send(cluster, [b"lost"], [HOUR_MS])
        await shard.until(lambda stats: stats.pending == 1)
    shutil.move(tmp_path / "t0", tmp_path / "away")
    async with running_shard(cluster, tmp_path) as shard:
        await until(lambda: refused(shard) == ["b0"])
        [handle] = await send(cluster, [b"kept"], [0])
        assert (await shard.stats()).pending == 0
        stub, queues = await owners(cluster)
        old = queues[0].owner
        assert (old.name, old.shard, old.shards) == ("t0", 0, 1)
        assert queues[0].refused.name == "t0"
        assert queues[0].refused.id != old.id
        release = timer_admin_pb2.ReleaseTimerQueuesRequest(id=old.id)
        with pytest.raises(InvalidArgument, match="stop it first"):
            await status.answer(stub.ReleaseTimerQueues(release))
        monkeypatch.setattr(timer_owners, "ALIVE_MS", 0)
        await status.answer(stub.ReleaseTimerQueues(release))
        await shard.until(lambda stats: stats.fired == 1 and not stats.in_flight)
        assert bodies_of(await delivered(cluster)) == [b"kept"]
        [result] = await shard.cancel(handle)
        assert not result.HasField("error")
    # The one that was given up comes back: what it holds may be with the other one too.
    shutil.rmtree(tmp_path / "t0")
    shutil.move(tmp_path / "away", tmp_path / "t0")
    async with running_shard(cluster, tmp_path) as shard:
        await until(lambda: refused(shard) == ["b0"])
        assert (await shard.stats()).pending == 1
        assert "replaced" in shard.service.shard.scheduler.dispatcher.fence


async def test_after_a_late_commit_nothing_of_a_service_that_was_given_up_comes_twice(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that it had given up arrives behind the next one, and nothing more is to be committed."""
    commits: list[broker_pb2.OffsetCommit] = []
    tell = broker_link.BrokerLink._tell

    async def told(self: Any, new: dict[int, int], known: dict[int, int]) -> dict[int, int]:
        commits.extend(
            broker_pb2.OffsetCommit(
                topic="%TIMER%", queue_id=each, offset=0, known_offset=known.get(each, -1)
            )
            for each in new
        )
        return await tell(self, new, known)

    monkeypatch.setattr(broker_link.BrokerLink, "_tell", told)
    async with running_shard(cluster, tmp_path) as shard:
        [first, _] = await send(cluster, [b"a", b"b"], [0, 0], producer_id=0)
        await shard.until(lambda stats: stats.fired == 2 and not stats.in_flight)
        stub, queues = await owners(cluster)
        await until(lambda: bool(commits))
        late = broker_pb2.CommitOffsetsRequest(
            group="%TIMER%", commits=commits[:1], timer_id=queues[0].owner.id
        )
    await status.answer(cluster.clients["b0"].broker.CommitOffsets(late))
    shutil.rmtree(tmp_path / "t0")
    monkeypatch.setattr(timer_owners, "ALIVE_MS", 0)
    async with running_shard(cluster, tmp_path) as shard:
        await until(lambda: refused(shard) == ["b0"])
        release = timer_admin_pb2.ReleaseTimerQueuesRequest(id=queues[0].owner.id)
        await status.answer(stub.ReleaseTimerQueues(release))
        await until(lambda: granted(shard))
        source, sent = SourceId(first.store_id, first.queue_id), 0
        while True:  # producers have a queue each
            [after] = await send(cluster, [b"c"], [0], producer_id=0)
            sent += 1
            if after.queue_id == source.queue_id:
                break
        numbers = shard.service.shard.scheduler.numbers

        def has_come_there() -> bool:
            found = numbers.source(source)
            return found is not None and found.next_offset > after.offset

        await until(has_come_there)
        await until(partial(has_come, cluster, 2 + sent))
        assert (await shard.stats()).accepted == sent


async def duemq(cluster: Cluster, *arguments: str) -> Result:
    arguments = (*arguments, "--nameserver", cluster.nameserver)
    return await asyncio.to_thread(CliRunner().invoke, cli, arguments)


async def test_a_shard_that_nobody_serves_is_said(cluster: Cluster, tmp_path: Path) -> None:
    async with Admin(cluster.nameserver) as admin:
        [missing] = await admin.timer_stats()
        assert (missing.shard, missing.shards, missing.address) == (0, 1, "")
        assert "no timer service is alive for shard 0 of 1" in str(missing.error)
        shown = await duemq(cluster, "cluster", "show")
        assert shown.exit_code == Exit.FAILED
        assert "no timer service is alive for shard 0 of 1" in " ".join(shown.output.split())

        async with running_shard(cluster, tmp_path, shard=0, shards=2):
            await until(lambda: bool(admin._client.routes.timers))
            alive, missing = await admin.timer_stats()
            assert (alive.error, alive.shard) == (None, 0)
            assert (missing.shard, missing.shards) == (1, 2)
            assert (await duemq(cluster, "cluster", "show")).exit_code == Exit.FAILED
            async with running_shard(cluster, tmp_path, name="t1", shard=1, shards=2):
                await until(lambda: len(admin._client.routes.timers) == 2)
                assert [each.error for each in await admin.timer_stats()] == [None, None]
                assert (await duemq(cluster, "cluster", "show")).exit_code == Exit.OK


async def test_the_command_line_gives_a_lost_service_up(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timer_owners, "ALIVE_MS", 0)
    assert (await duemq(cluster, "timer", "release", "0")).exit_code == Exit.USAGE
    async with running_shard(cluster, tmp_path) as shard:
        await send(cluster, [b"lost"], [HOUR_MS])
        await shard.until(lambda stats: stats.pending == 1)
    shutil.rmtree(tmp_path / "t0")
    async with running_shard(cluster, tmp_path, name="t9") as shard:
        await until(lambda: refused(shard) == ["b0"])
        shown = await duemq(cluster, "timer", "release", "0")
        assert shown.exit_code == Exit.FAILED
        assert "took 1 delayed messages over" in " ".join(shown.output.split())
        assert "under timer keys" in shown.stderr
        [row, *_] = map(
            json.loads, (await duemq(cluster, "timer", "owners", "--json")).stdout.splitlines()
        )
        assert (row["name"], row["refused"], row["shard"]) == ("t0", "t9", 0)
        done = await duemq(cluster, "timer", "release", "0", "--accept-loss")
        assert done.exit_code == Exit.OK
        await until(lambda: granted(shard))


async def test_what_a_late_broker_keeps_for_a_lost_service_is_given_up_beside_its_successor(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The successor, which lives and has queues of the same shard elsewhere, loses none of them."""
    release = ("timer", "release", "0", "--accept-loss")
    await cluster.start_broker("b1")
    async with running_shard(cluster, tmp_path) as shard:
        await until(lambda: sum(x.granted for x in shard.service._links.by_name.values()) == 2)
        alive = await duemq(cluster, *release)
        assert alive.exit_code == Exit.USAGE
        assert "stop it first" in alive.stderr
    shutil.rmtree(tmp_path / "t0")
    await cluster.stop_broker("b1")
    assert (await duemq(cluster, "cluster", "forget", "b1", "--yes")).exit_code == Exit.OK
    with monkeypatch.context() as a_minute_later:
        a_minute_later.setattr(timer_owners, "ALIVE_MS", 0)
        assert (await duemq(cluster, *release)).exit_code == Exit.OK
    async with running_shard(cluster, tmp_path, name="t9") as shard:
        await until(lambda: granted(shard))
        await cluster.start_broker("b1")
        await until(lambda: refused(shard) == ["b1"])
        shown = (await duemq(cluster, *release[:-1], "--json")).stdout
        assert {json.loads(line)["broker"] for line in shown.splitlines()} == {"b1"}
        done = await duemq(cluster, *release)
        assert done.exit_code == Exit.OK, done.stderr
        await until(lambda: not refused(shard))
        owners = cluster.brokers["b0"].store.timer_owners
        assert not owners.claim_of(0).released


async def test_a_data_directory_refuses_another_shard(cluster: Cluster, tmp_path: Path) -> None:
    async with (
        running_shard(cluster, tmp_path, name="first", shard=0, shards=2),
        running_shard(cluster, tmp_path, shard=1, shards=2) as shard,
    ):
        await until(lambda: granted(shard))
    with pytest.raises(InvalidArgument, match="is that of shard 1, not of shard 0"):
        async with running_shard(cluster, tmp_path, shard=0, shards=2):
            pass


async def test_only_the_owner_commits_and_fetches(cluster: Cluster, tmp_path: Path) -> None:
    client = cluster.clients["b0"]
    async with running_shard(cluster, tmp_path) as shard:
        await until(lambda: granted(shard))
        commit = broker_pb2.OffsetCommit(topic="%TIMER%", queue_id=0, offset=0)
        answer = await client.broker.CommitOffsets(
            broker_pb2.CommitOffsetsRequest(group="%TIMER%", commits=[commit])
        )
        assert answer.queues[0].error.code == ErrorCode.FENCED_TIMER
        request = broker_pb2.FetchFramesRequest(topic="%TIMER%", queue_id=0)
        with pytest.raises(FencedTimer):
            await status.answer(client.broker.FetchFrames(request))
        with pytest.raises(InvalidArgument):
            await status.answer(
                client.broker.AcquireQueues(
                    broker_pb2.AcquireQueuesRequest(group="%TIMER%", generation=9)
                )
            )


@pytest.mark.parametrize("behind_ms", [400, 2_000])
async def test_nothing_is_early_by_the_brokers_clock(
    behind_ms: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    real = broker_process.now_ms
    monkeypatch.setattr(broker_process, "now_ms", lambda: real() - behind_ms)
    monkeypatch.setattr(broker_links, "CLOCK_INTERVAL_S", 0.05)
    async with running_cluster(tmp_path, "b0") as cluster:
        await cluster.create_topic(TOPIC, queues=2)
        async with running_shard(cluster, tmp_path) as shard:
            for number in range(20):
                await send(cluster, [b"%d" % number], [20 * number])
            await shard.until(lambda stats: stats.fired == 20 and not stats.in_flight)
            await until(partial(has_come, cluster, 20))  # none before its time
            assert shard.service.shard.lateness.early == 0
            [problem] = (await shard.stats()).problems
            assert "ahead of that of broker b0" in problem
            await until(lambda: "ahead of that of broker b0" in caplog.text)


async def test_a_clock_that_is_ahead_delays_nothing_that_is_due_sooner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = broker_process.now_ms
    monkeypatch.setattr(broker_process, "now_ms", lambda: real() - 60_000)
    async with running_cluster(tmp_path, "b0", timer_queues=1) as cluster:
        await cluster.create_topic(TOPIC, queues=2)
        async with running_shard(cluster, tmp_path) as shard:
            await until(lambda: granted(shard))
            [handle] = await send(cluster, [b"later"], [50_000], queue_id=0)
            await shard.until(lambda stats: stats.accepted == 1)
            await send(cluster, [b"sooner"], [50], queue_id=0)
            await shard.until(lambda stats: stats.fired == 1 and not stats.in_flight)
            await until(partial(has_come, cluster, 1))
            assert bodies_of(await delivered(cluster)) == [b"sooner"]
            [result] = await shard.cancel(handle)
            assert result.outcome == timer_pb2.CANCELLED


def set_service_clock(monkeypatch: pytest.MonkeyPatch, clock: SimpleNamespace) -> None:
    """The timer service reads this clock instead of the machine's."""
    for module in (firing, fire_stream):
        monkeypatch.setattr(module, "time", clock)
    for module in (firing, fire_stream, broker_link, broker_links):
        monkeypatch.setattr(module, "now_ms", lambda: clock.time_ns() // 1_000_000)


async def test_what_a_clock_that_was_set_ahead_handed_out_is_not_early(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was dispatched before anybody noticed; then the service keeps to the broker's clock."""
    monkeypatch.setattr(broker_links, "CLOCK_INTERVAL_S", 0.05)
    ahead_s = 0
    clock = SimpleNamespace(
        time=lambda: time.time() + ahead_s,
        time_ns=lambda: time.time_ns() + ahead_s * 1_000_000_000,
        monotonic_ns=time.monotonic_ns,
    )
    set_service_clock(monkeypatch, clock)
    async with running_shard(cluster, tmp_path) as shard:
        await send(cluster, [b"a", b"b"], [4_000, 4_500])
        await shard.until(lambda stats: stats.accepted == 2)
        ahead_s = 60
        await shard.until(lambda stats: stats.fired == 2)
        await shard.until(lambda stats: not stats.in_flight)
        await until(partial(has_come, cluster, 2))  # none before its time
        assert bodies_of(await delivered(cluster)) == [b"a", b"b"]


async def test_clocks_that_go_back_hold_nothing_at_the_broker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Broker and service on one machine: what was dispatched was due by the clock as it stood."""
    back_ms = 0
    real = broker_process.now_ms
    monkeypatch.setattr(broker_process, "now_ms", lambda: real() - back_ms)
    clock = SimpleNamespace(
        time=lambda: time.time() - back_ms / 1000,
        time_ns=lambda: time.time_ns() - back_ms * 1_000_000,
        monotonic_ns=time.monotonic_ns,
    )
    set_service_clock(monkeypatch, clock)
    # The head start is stretched, so that the step falls into it.
    monkeypatch.setattr(firing, "AHEAD_MS", 500)
    async with running_cluster(tmp_path, "b0", timer_queues=1) as cluster:
        await cluster.create_topic(TOPIC, queues=1)
        async with running_shard(cluster, tmp_path) as shard:
            await send(cluster, [b"before"], [1_000], queue_id=0)
            await shard.until(lambda stats: stats.fired == 1)
            back_ms = HOUR_MS
            await send(cluster, [b"after"], [10], queue_id=0)
            await shard.until(lambda stats: stats.fired == 2 and not stats.in_flight)
            await cluster.shown()
            assert await cluster.clients["b0"].bodies(TOPIC) == [b"before", b"after"]


async def test_a_clock_that_goes_back_prolongs_no_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = broker_process.now_ms
    stepped = False

    def now_ms() -> int:
        return real() - (HOUR_MS if stepped else 0)

    monkeypatch.setattr(broker_process, "now_ms", now_ms)
    async with running_cluster(tmp_path, "b0") as cluster:
        await cluster.create_topic(TOPIC, queues=1)
        client = cluster.clients["b0"]
        not_before_ms = real() + 500
        [result] = await client.send(batch(TOPIC, [b"a"], not_before_ms=not_before_ms))
        assert not result.HasField("error")
        stepped = True
        response = await client.pull(TOPIC, wait_ms=30_000)
        assert response.queues
        assert real() >= not_before_ms


async def test_a_clock_that_is_set_is_said(
    cluster: Cluster,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(broker_links, "CLOCK_INTERVAL_S", 0.01)
    async with running_shard(cluster, tmp_path):
        real = broker_links.now_ms
        monkeypatch.setattr(broker_links, "now_ms", lambda: real() + HOUR_MS)
        # Two clocks are read one after the other: time passes between them.
        said = re.compile(r"clock was set by \+(3600|35\d\d)\.\d")
        await until(lambda: said.search(caplog.text) is not None)


async def test_a_topic_made_anew_with_fewer_queues_gets_its_delayed_messages(
    cluster: Cluster, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    client = cluster.clients["b0"]
    await cluster.create_topic("anew", queues=4)
    async with running_shard(cluster, tmp_path) as shard:
        for queue_id in (-1, 0, 3):
            body = b"%d" % queue_id
            made = batch("anew", [body], delays_ms=[HOUR_MS], queue_id=queue_id, producer_id=0)
            await client.send(made)
        await shard.until(lambda stats: stats.accepted == 3)
        await client.admin.DeleteTopic(admin_pb2.DeleteTopicRequest(name="anew"))
        async with Admin(cluster.nameserver) as admin:
            assert await admin.shift_pending("anew", -HOUR_MS / 1000) == 3
        await shard.until(lambda stats: sum(each.timers for each in stats.stuck) == 3)
        stats = await shard.stats()
        assert {each.topic for each in stats.stuck} == {"anew"}
        assert "topic" in stats.stuck[0].reason
        await send(cluster, [b"other"], [0])
        await shard.until(lambda stats: stats.fired == 1 and not stats.in_flight)

        await cluster.create_topic("anew", queues=2)
        await shard.until(lambda stats: stats.fired == 4 and not stats.in_flight)
        await cluster.shown()
        found = [*await client.bodies("anew", 0), *await client.bodies("anew", 1)]
        assert sorted(found) == [b"-1", b"0", b"3"]
        assert b"3" in await client.bodies("anew", 1)
        assert not (await shard.stats()).stuck
        assert "has 2 queues at broker b0 now, it had 4" in caplog.text


async def test_what_can_never_be_stored_is_a_dead_letter_and_the_rest_goes_on(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_shard(cluster, tmp_path) as shard:
        await until(lambda: granted(shard))
        real = fire_lane.fired

        def spoiled(slices: Iterable[Any]) -> tuple[list[bytes], Any]:
            pieces, sizes = real(slices)
            return pieces, sizes + 1 if b"bad" in b"".join(pieces) else sizes

        monkeypatch.setattr(fire_lane, "fired", spoiled)
        await send(cluster, [b"bad"], [0], queue_id=1)
        # Else both may be of one batch, which is refused as a whole.
        await shard.until(lambda stats: stats.fired == 1 and not stats.in_flight)
        await send(cluster, [b"good"], [0], queue_id=1)
        await shard.until(lambda stats: stats.fired == 2 and not stats.in_flight)
        assert bodies_of(await delivered(cluster)) == [b"good"]
    async with Admin(cluster.nameserver) as admin:
        [letter] = [each async for each in admin.dead_letters("%TIMER%")]
        assert letter.body == b"bad"
        assert letter.retry is not None
        assert "sizes" in letter.retry.error
    listed = await duemq(cluster, "dlq", "list", "%TIMER%", "--json")
    assert json.loads(listed.stdout)["origin"]["topic"] == TOPIC


async def test_a_lower_limit_does_not_stop_what_was_accepted_before(tmp_path: Path) -> None:
    async with running_cluster(tmp_path, "b0", message_bytes_max=200_000) as cluster:
        await cluster.create_topic(TOPIC, queues=2)
        await send(cluster, [b"x" * 100_000], [0])
        await cluster.stop_broker("b0")
        cluster._settings["message_bytes_max"] = 64 << 10
        await cluster.start_broker("b0")
        async with running_shard(cluster, tmp_path) as shard:
            await send(cluster, [b"small"], [0])
            await shard.until(lambda stats: stats.fired == 2 and not stats.in_flight)
        assert [len(body) for body in bodies_of(await delivered(cluster))] == [5, 100_000]


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


async def test_a_damaged_frame_that_was_set_aside_holds_up_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with running_cluster(tmp_path, "b0", timer_queues=1) as cluster:
        await cluster.create_topic(TOPIC, queues=2)
        for number in range(5):
            await send(cluster, [b"%d" % number], [0])
        store = cluster.brokers["b0"].store
        damaged = store.queue("%TIMER%", 0).frame_at(2)
        [segment] = store.log.segments
        await cluster.stop_broker("b0")
        flip(Path(segment.path), damaged + 150)
        set_aside(str(tmp_path / "b0" / "commitlog"), damaged, RealDisk())
        await cluster.start_broker("b0")
        async with running_shard(cluster, tmp_path) as shard:
            await shard.until(lambda stats: stats.fired == 4 and not stats.in_flight)
            assert bodies_of(await delivered(cluster)) == [b"0", b"1", b"3", b"4"]
            assert "has lost the timers at offsets 2 to 2" in caplog.text
        async with running_shard(cluster, tmp_path) as shard:
            await send(cluster, [b"5"], [0])
            await shard.until(lambda stats: stats.fired == 5 and not stats.in_flight)


async def test_a_restarted_shard_is_newer_though_the_clock_was_set_back(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_shard(cluster, tmp_path):
        await until(lambda: bool(cluster.registry.timers))
    real = timer_process.now_ms
    monkeypatch.setattr(timer_process, "now_ms", lambda: real() - HOUR_MS)
    async with running_shard(cluster, tmp_path) as shard:
        address = shard.service.server.address
        await until(lambda: [one.report.address for one in cluster.registry.timers] == [address])
