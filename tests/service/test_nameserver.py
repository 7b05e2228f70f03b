"""Nameservers, registrations and watchers over real gRPC in one process."""

import asyncio
import socket
from contextlib import asynccontextmanager, contextmanager
from zlib import crc32

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from duemq import errors
from duemq.transport import channel, status
from duemq.transport.routing import route_watcher
from duemq.transport.routing.route_watcher import RouteWatcher
from duemq.v1 import nameserver_pb2 as pb
from duemq.v1.stubs import NameserverStub
from duemq_server.local_cluster.layout import bind_port
from duemq_server.nameserver import process
from duemq_server.nameserver.edge.servicer import OVERRIDES, SERVICE, NameserverServicer
from duemq_server.nameserver.registry import Registry
from duemq_server.nameserver.reports import BrokerReport, Version
from duemq_server.nameserver.settings import Settings
from duemq_server.serving import registration as registrations
from duemq_server.serving.registration import Registration
from duemq_server.serving.server import Server
from tests.service.cut_link import link_to

WAIT_S = 30.0
# gRPC ends a connection at the third ping that comes too soon.
PINGS_TURNED_AWAY = 4


class Clock:
    """Stands still until moved."""

    def __init__(self):
        self.ms = 1_000_000

    def now_ms(self):
        return self.ms


class Nameserver:
    """One nameserver, to be killed and started again on its port, which is its own meanwhile."""

    def __init__(self, held, **settings):
        self.address = f"127.0.0.1:{held.getsockname()[1]}"
        self.settings = {"listen": self.address, "ready_after": 0.0, **settings}
        self.clock = Clock()

    async def start(self):
        settings = Settings(**self.settings, drain_timeout=0.0)
        ready_at_ms = self.clock.now_ms() + int(settings.ready_after * 1000)
        self.registry = Registry(ready_at_ms, int(settings.expiry * 1000))
        self.server = Server(settings)
        self.servicer = NameserverServicer(
            self.registry, self.clock.now_ms, settings.watchers_max, self.server.unsent
        )
        self.server.add(SERVICE, self.servicer, OVERRIDES)
        await self.server.start(announced=False)

    async def kill(self):
        await self.server.stop()

    def expire(self):
        self.registry.expire(self.clock.now_ms())
        self.servicer.wake()


@asynccontextmanager
async def running(**settings):
    with bind_port(0) as held:
        nameserver = Nameserver(held, **settings)
        await nameserver.start()
        try:
            yield nameserver
        finally:
            await nameserver.kill()


@pytest.fixture
async def nameserver():
    async with running() as nameserver:
        yield nameserver


@pytest.fixture
async def stub(nameserver):
    async with channel.connect(nameserver.address) as connection:
        yield NameserverStub(connection)


def broker(name="a", topics=("t",), queues=4):
    served = [
        pb.TopicQueues(topic=topic, queues=queues, readable=True, writable=True) for topic in topics
    ]
    store_id = 7 if name == "a" else crc32(name.encode())
    return pb.BrokerReport(name=name, address=f"{name}:1", topics=served, store_id=store_id)


def register(report, epoch=1, counter=1, **more):
    version = pb.Version(epoch=epoch, counter=counter)
    kind = "broker" if isinstance(report, pb.BrokerReport) else "timer"
    return pb.RegisterRequest(version=version, **{kind: report}, **more)


@asynccontextmanager
async def registered(report, nameservers, period_s=0.2):
    registration = Registration(nameservers, period_s, 1, report)
    registration.start()
    try:
        yield registration
    finally:
        await registration.stop()


@asynccontextmanager
async def watching(nameservers, topics=()):
    watcher = RouteWatcher(nameservers, topics=topics)
    watcher.start()
    try:
        yield watcher
    finally:
        await watcher.stop()


@contextmanager
def silent_server():
    """The system accepts its connections; nobody answers."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        host, port = listening.getsockname()
        yield f"{host}:{port}"


async def until(condition):
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


def knows(topic):
    return lambda cache: cache.route(topic) is not None


def lacks(topic):
    return lambda cache: cache.route(topic) is None


async def test_a_registered_topic_has_a_route(stub):
    assert (await stub.Register(register(broker("b")))).accepted
    assert (await stub.Register(register(broker("a", queues=2)))).accepted
    route = await stub.GetRoute(pb.GetRouteRequest(topic="t"))
    assert [(one.broker, one.address, one.queues) for one in route.brokers] == [
        ("a", "a:1", 2),
        ("b", "b:1", 4),
    ]


async def test_the_cluster_lists_brokers_timers_and_routes(nameserver, stub):
    await stub.Register(register(broker()))
    await stub.Register(register(pb.TimerReport(name="x", address="x:1", shard=0, shards=1)))
    cluster = await stub.GetCluster(pb.GetClusterRequest())
    assert [one.name for one in cluster.brokers] == ["a"]
    assert cluster.brokers[0].last_heard_ms == nameserver.clock.ms
    assert cluster.brokers[0].version == pb.Version(epoch=1, counter=1)
    assert [one.name for one in cluster.timers] == ["x"]
    assert [one.topic for one in cluster.routes] == ["t"]


async def test_a_route_tells_whose_an_address_is(stub):
    await stub.Register(register(broker("a")))
    await stub.Register(register(broker("b", topics=["u"])))
    told = (
        [await stub.GetRoute(pb.GetRouteRequest(topic=topic)) for topic in "tu"],
        (await stub.GetCluster(pb.GetClusterRequest())).routes,
        (await stub.WatchRoutes(pb.WatchRoutesRequest()).read()).routes,
    )
    for routes in told:
        ids = {one.broker: one.store_id for route in routes for one in route.brokers}
        assert ids == {"a": 7, "b": crc32(b"b")}


async def test_an_older_report_is_not_accepted(stub):
    await stub.Register(register(broker(topics=["t"]), counter=2))
    assert not (await stub.Register(register(broker(topics=[]), counter=1))).accepted
    assert (await stub.GetRoute(pb.GetRouteRequest(topic="t"))).brokers


async def test_an_unknown_topic_is_not_found(stub):
    with pytest.raises(errors.TopicNotFound):
        await status.answer(stub.GetRoute(pb.GetRouteRequest(topic="t")))


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (pb.RegisterRequest(), "report"),
        (register(pb.BrokerReport(address="a:1")), "broker.name"),
        (register(pb.BrokerReport(name="a", address="a")), "broker.address"),
        (register(broker(topics=[""])), "broker.topics.topic"),
        (register(broker(topics=["t" * 135])), "broker.topics.topic"),
        (register(broker(queues=1025)), "broker.topics.queues"),
        (register(broker(), expiry_ms=-1), "expiry_ms"),
        (register(pb.TimerReport(name="x", address="x:1")), "timer.shards"),
        (register(pb.TimerReport(name="x", address="x:1", shard=-1, shards=2)), "timer.shard"),
        (
            register(pb.TimerReport(name="x", address="x:1", shards=2, key_shards=-1)),
            "timer.key_shards",
        ),
    ],
)
async def test_a_bad_report_is_refused_by_field(stub, request_, field):
    with pytest.raises(errors.InvalidArgument) as caught:
        await status.answer(stub.Register(request_))
    assert caught.value.field == field


async def test_a_bad_goodbye_is_refused(stub):
    with pytest.raises(errors.InvalidArgument):
        await status.answer(stub.Deregister(pb.DeregisterRequest()))


async def test_a_fresh_nameserver_says_so():
    async with running(ready_after=10.0) as fresh, channel.connect(fresh.address) as connection:
        stub = NameserverStub(connection)
        assert (await stub.Register(register(broker()))).accepted
        for call in (
            stub.GetRoute(pb.GetRouteRequest(topic="t")),
            stub.GetCluster(pb.GetClusterRequest()),
            stub.WatchRoutes(pb.WatchRoutesRequest()).read(),
        ):
            with pytest.raises(errors.NotReady):
                await status.answer(call)
        fresh.clock.ms += 10_000
        assert (await stub.GetRoute(pb.GetRouteRequest(topic="t"))).brokers


async def test_changes_are_pushed(nameserver, stub):
    await stub.Register(register(broker(topics=["t"])))
    stream = stub.WatchRoutes(pb.WatchRoutesRequest())
    first = await stream.read()
    assert first.whole
    assert [one.topic for one in first.routes] == ["t"]
    await stub.Register(register(broker(topics=["u"]), counter=2))
    second = await stream.read()
    assert not second.whole
    assert [one.topic for one in second.routes] == ["u"]
    assert list(second.removed_topics) == ["t"]
    assert [one.name for one in second.brokers] == ["a"]
    stream.cancel()


async def test_a_watch_of_some_topics_is_told_of_those(stub):
    stream = stub.WatchRoutes(pb.WatchRoutesRequest(topics=["u"]))
    assert not (await stream.read()).routes
    await stub.Register(register(broker(topics=["t", "u"])))
    assert [one.topic for one in (await stream.read()).routes] == ["u"]
    stream.cancel()


async def test_the_number_of_watchers_is_bounded_and_closed_ones_do_not_count():
    async with running(watchers_max=1) as server, channel.connect(server.address) as connection:
        stub = NameserverStub(connection)
        first = stub.WatchRoutes(pb.WatchRoutesRequest())
        await first.read()
        with pytest.raises(errors.Overloaded):
            await status.answer(stub.WatchRoutes(pb.WatchRoutesRequest()).read())
        first.cancel()
        await until(lambda: not server.servicer.watchers)
        third = stub.WatchRoutes(pb.WatchRoutesRequest())
        assert (await third.read()).whole
        third.cancel()


async def test_a_stopping_nameserver_ends_its_watches(nameserver, stub):
    stream = stub.WatchRoutes(pb.WatchRoutesRequest())
    await stream.read()
    nameserver.servicer.close()
    assert await stream.read() is grpc.aio.EOF


async def test_a_registration_appears_changes_at_once_and_vanishes_at_once(nameserver, monkeypatch):
    # A goodbye that is given up is never said again.
    monkeypatch.setattr(registrations, "DEREGISTER_TIMEOUT_S", WAIT_S)
    report = broker(topics=["t"])
    nameservers = [nameserver.address]
    async with watching(nameservers) as watcher:
        # So long that only the change itself can bring the news.
        async with registered(lambda: report, nameservers, period_s=600) as registration:
            await watcher.wait_for(knows("t"), WAIT_S)
            report = broker(topics=["t", "u"])
            registration.changed()
            await watcher.wait_for(knows("u"), WAIT_S)
        await watcher.wait_for(lacks("t"), WAIT_S)
        assert watcher.cache.brokers == ()


def replica(name="b", **more):
    return pb.ReplicaReport(
        name=name, **{"role": pb.FOLLOWER, "in_sync": True, "epoch": 3, "address": "b:1", **more}
    )


async def cluster_of(stub):
    return await stub.GetCluster(pb.GetClusterRequest())


@pytest.mark.parametrize("kind", ["broker", "timer"])
async def test_replicas_are_listed_as_they_were_reported(stub, kind):
    leader = replica("a", role=pb.LEADER, address="a:1")
    behind = replica(lag_bytes=5, lag_s=0.5, since_ms=7, in_sync=False, reason="slow")
    report = broker() if kind == "broker" else pb.TimerReport(name="a", address="a:1", shards=1)
    report.replicas.extend([behind, leader])
    report.epoch = 3
    await stub.Register(register(report))
    [found] = getattr(await cluster_of(stub), f"{kind}s")
    assert (list(found.replicas), found.epoch) == ([leader, behind], 3)
    report.replicas[0].reason = "x" * 10_000
    await stub.Register(register(report))
    [found] = getattr(await cluster_of(stub), f"{kind}s")
    assert set(found.replicas[1].reason) == {"x"}
    assert len(found.replicas[1].reason) < 1_000


@pytest.mark.parametrize(
    ("replicas", "field"),
    [
        ([replica("a b")], "broker.replicas.name"),
        ([replica(address="nowhere")], "broker.replicas.address"),
        ([replica(f"r{number}") for number in range(17)], "broker.replicas"),
    ],
)
async def test_a_report_of_strange_replicas_is_refused(stub, replicas, field):
    report = broker()
    report.replicas.extend(replicas)
    with pytest.raises(errors.InvalidArgument) as caught:
        await status.answer(stub.Register(register(report)))
    assert caught.value.field == field


async def test_a_lag_comes_with_a_heartbeat_and_wakes_no_watcher(nameserver, stub):
    report = broker()
    report.replicas.append(replica())
    async with registered(lambda: report, [nameserver.address]) as registration:
        await until(lambda: nameserver.registry.brokers)
        revision = nameserver.registry.revision
        report.replicas[0].lag_bytes = 77
        registration.changed()
        await until(lambda: nameserver.registry.brokers[0].report.replicas[0].lag_bytes == 77)
        assert nameserver.registry.revision == revision
        report.replicas[0].in_sync = False
        registration.changed()
        await until(lambda: not nameserver.registry.brokers[0].report.replicas[0].in_sync)
        assert nameserver.registry.revision == revision + 1


async def test_an_instance_that_is_not_the_newest_of_its_name_is_told_so(nameserver, stub, caplog):
    await stub.Register(register(broker("a"), epoch=2))
    async with registered(lambda: broker("a", topics=[]), [nameserver.address]):
        await until(lambda: "knows a newer instance of this name" in caplog.text)
    assert (await stub.GetRoute(pb.GetRouteRequest(topic="t"))).brokers


def of_store(store_id, topics=("t",)):
    report = broker(topics=topics)
    report.store_id = store_id
    return report


def ended(registration):
    """The refusal's text."""
    error = registration.refused.exception()
    assert isinstance(error, errors.InvalidArgument)
    return str(error)


@pytest.fixture
def patient_check(monkeypatch):
    """A nameserver that is slow to answer is not passed over."""
    monkeypatch.setattr(registrations, "CHECK_TIMEOUT_S", WAIT_S)


async def test_a_name_that_another_store_has_is_refused_before_and_after_the_start(
    nameserver, patient_check
):
    nameservers = [nameserver.address]
    async with registered(lambda: of_store(1), nameservers):
        await until(lambda: nameserver.registry.brokers)
        second = Registration(nameservers, 0.2, 2, lambda: of_store(2, topics=()))
        with pytest.raises(errors.InvalidArgument, match="a:1") as taken:
            await second.check_free()
        assert (taken.value.field, taken.value.value) == ("name", "a")
        for part in ("0000000000000001", "0000000000000002", "1970-", nameserver.address):
            assert part in str(taken.value)
        second.start()
        await until(second.refused.done)
        assert "0000000000000001" in ended(second)
        await second.stop()
        assert nameserver.registry.topics == ("t",)
    third = Registration(nameservers, 0.2, 3, lambda: of_store(2))
    await third.check_free()
    assert not nameserver.registry.brokers


async def test_a_nameserver_that_says_nothing_does_not_keep_a_start_from_its_name(nameserver):
    with silent_server() as silent:
        await Registration([silent, nameserver.address], 0.2, 1, broker).check_free()


async def test_a_start_is_told_how_far_the_log_of_its_store_went(nameserver, stub, patient_check):
    def of(store_id, log_end=0):
        return pb.BrokerReport(name="a", address="a:1", store_id=store_id, log_end=log_end)

    async def known(store_id):
        return await Registration([nameserver.address], 0.2, 9, lambda: of(store_id)).check_free()

    assert await known(1) == 0
    async with registered(lambda: of(1, 1_000), [nameserver.address]):
        await until(lambda: nameserver.registry.log_end(1) == 1_000)
        assert await known(1) == 1_000
    assert await known(1) == 1_000
    await stub.Register(register(of(1, 900), epoch=2))
    revision = nameserver.registry.revision
    await stub.Register(register(of(1, 910), epoch=2))
    assert nameserver.registry.revision == revision
    assert await known(1) == 910


async def test_the_end_of_a_log_that_no_log_has_is_refused(stub):
    report = pb.BrokerReport(name="a", address="a:1", log_end=(1 << 60) + 1)
    with pytest.raises(errors.InvalidArgument, match="log_end"):
        await status.answer(stub.Register(register(report)))


async def test_a_name_whose_holder_claims_an_absurd_start_is_refused_alike(
    nameserver, stub, patient_check
):
    await stub.Register(register(of_store(1), epoch=(1 << 64) - 1))
    with pytest.raises(errors.InvalidArgument, match=f"started {(1 << 64) - 1} ms"):
        await Registration([nameserver.address], 0.2, 2, lambda: of_store(2)).check_free()


async def test_a_listener_that_fails_does_not_end_the_watch(nameserver, stub, caplog):
    async with watching([nameserver.address]) as watcher:
        await watcher.ready(WAIT_S)
        failing = [ValueError("a bug")]

        def fail_once() -> None:
            if failing:
                raise failing.pop()

        watcher.on_change(fail_once)
        await stub.Register(register(broker(topics=["t"])))
        await stub.Register(register(broker(topics=["t", "u"]), counter=2))
        await watcher.wait_for(knows("u"), WAIT_S)
    assert "could not be taken over" in caplog.text


async def test_of_two_that_were_both_taken_in_somewhere_the_younger_goes(caplog):
    """Each could reach one nameserver only, and not the same."""
    async with (
        running() as one,
        running() as two,
        link_to(two.address) as from_older,
        link_to(one.address) as from_younger,
    ):
        from_older.cut()
        from_younger.cut()
        older = Registration([one.address, from_older.address], 0.2, 1, lambda: of_store(1))
        younger = Registration([from_younger.address, two.address], 0.2, 2, lambda: of_store(2))
        await younger.check_free()
        older.start()
        younger.start()
        await until(lambda: older._accepted and younger._accepted)
        from_older.heal()
        from_younger.heal()
        await until(younger.refused.done)
        await until(lambda: "this process was here first and goes on" in caplog.text)
        await younger.stop()
        await until(lambda: [one.report.store_id for one in two.registry.brokers] == [1])
        assert not older.refused.done()
        await older.stop()


async def test_a_silent_broker_vanishes_when_its_report_runs_out(nameserver, stub):
    await stub.Register(register(broker(), expiry_ms=5_000))
    async with watching([nameserver.address]) as watcher:
        await watcher.wait_for(knows("t"), WAIT_S)
        nameserver.clock.ms += 5_000
        nameserver.expire()
        await watcher.wait_for(lacks("t"), WAIT_S)


async def test_watchers_and_askers_are_told_who_is_lost_and_since_when(nameserver, stub):
    shard = pb.TimerReport(name="x", address="x:1", shard=0, shards=1)
    await stub.Register(register(broker(), expiry_ms=5_000))
    await stub.Register(register(shard))
    async with watching([nameserver.address]) as watcher:
        await watcher.wait_for(knows("t"), WAIT_S)
        nameserver.clock.ms += 5_000
        nameserver.expire()
        await stub.Deregister(pb.DeregisterRequest(version=pb.Version(epoch=1), timer="x"))
        await stub.Deregister(pb.DeregisterRequest(version=pb.Version(epoch=2), timer="x"))
        await watcher.wait_for(lambda cache: cache.lost_timers != (), WAIT_S)
        [lost], [timer] = watcher.cache.lost_brokers, watcher.cache.lost_timers
    now_ms = nameserver.clock.ms
    assert (lost.broker.name, lost.broker.store_id) == ("a", 7)
    assert (lost.since_ms, lost.stopped) == (now_ms, False)
    assert (timer.timer.name, timer.since_ms, timer.stopped) == ("x", now_ms, True)
    cluster = await stub.GetCluster(pb.GetClusterRequest())
    assert [(one.name, one.lost_ms) for one in cluster.lost_brokers] == [("a", now_ms)]
    assert [(one.name, one.stopped) for one in cluster.lost_timers] == [("x", True)]


async def test_watchers_hear_at_once_of_who_is_given_up(nameserver, stub):
    shard = pb.TimerReport(name="x", address="x:1", shard=0, shards=1)
    await stub.Register(register(broker(), expiry_ms=5_000))
    await stub.Register(register(shard, expiry_ms=5_000))
    async with watching([nameserver.address]) as watcher:
        await watcher.wait_for(knows("t"), WAIT_S)
        nameserver.clock.ms += 5_000
        nameserver.expire()
        await watcher.wait_for(lambda cache: bool(cache.lost_brokers), WAIT_S)
        assert watcher.cache.away == ("a",)
        given_up = await stub.Forget(pb.ForgetRequest(broker="a"))
        await watcher.wait_for(lambda cache: not cache.lost_brokers, WAIT_S)
        assert watcher.cache.away == ()
        assert len(watcher.cache.lost_timers) == 1
        await stub.Forget(pb.ForgetRequest(timer="x"))
        await watcher.wait_for(lambda cache: not cache.lost_timers, WAIT_S)
    assert (given_up.address, given_up.lost_ms) == ("a:1", nameserver.clock.ms)
    assert [(one.topic, one.queues) for one in given_up.topics] == [("t", 4)]
    # A watch that begins now hears the same.
    async with watching([nameserver.address]) as watcher:
        await watcher.ready(WAIT_S)
        assert (watcher.cache.lost_brokers, watcher.cache.lost_timers) == ((), ())


@pytest.mark.parametrize(
    ("request_", "error"),
    [
        (pb.ForgetRequest(broker="a"), errors.InvalidArgument),
        (pb.ForgetRequest(broker="b"), errors.InstanceNotFound),
        (pb.ForgetRequest(timer="a"), errors.InstanceNotFound),
        (pb.ForgetRequest(), errors.InvalidArgument),
        (pb.ForgetRequest(broker="no name"), errors.InvalidArgument),
    ],
    ids=["lives", "unknown", "other-kind", "nobody", "no-name"],
)
async def test_only_who_is_lost_is_given_up(stub, request_, error):
    await stub.Register(register(broker()))
    with pytest.raises(error):
        await status.answer(stub.Forget(request_))


async def test_a_fresh_nameserver_gives_nobody_up():
    async with running(ready_after=10.0) as nameserver, channel.connect(nameserver.address) as to:
        with pytest.raises(errors.NotReady):
            await status.answer(NameserverStub(to).Forget(pb.ForgetRequest(broker="a")))


async def test_a_nameserver_that_is_cut_off_from_a_broker_hides_it_from_nobody():
    async with (
        running() as one,
        running() as two,
        registered(lambda: broker("a"), [one.address, two.address]),
        registered(lambda: broker("c", topics=["c"]), [one.address]),
        watching([one.address, two.address]) as watcher,
    ):
        expected = f"{one.address} lists a, c; {two.address} lists a"
        await until(lambda: watcher.story() == expected)
        assert [each.name for each in watcher.cache.brokers] == ["a", "c"]


async def test_the_first_answer_waits_for_the_other_nameserver_but_not_for_a_silent_one(
    monkeypatch,
):
    """A process that decides on what it hears first shall hear of everybody."""
    async with (
        running() as one,
        running() as two,
        registered(lambda: broker("a"), [one.address]),
        registered(lambda: broker("c"), [two.address]),
    ):
        await until(lambda: one.registry.brokers and two.registry.brokers)
        nameservers = [one.address, two.address]
        with monkeypatch.context() as patch:
            patch.setattr(route_watcher, "SETTLE_S", WAIT_S)
            async with watching(nameservers) as watcher:
                await watcher.ready(WAIT_S)
                assert [each.name for each in watcher.cache.brokers] == ["a", "c"]
        # The silent one never counts as dead, and the wait ends when both others have been heard.
        monkeypatch.setattr(route_watcher, "FIRST_UPDATE_TIMEOUT_S", 2 * WAIT_S)
        connect_timeout = "grpc.min_reconnect_backoff_ms"
        monkeypatch.setitem(channel._NAMESERVER_OPTIONS, connect_timeout, int(2_000 * WAIT_S))
        waits = {}
        monkeypatch.setattr(
            RouteWatcher,
            "_after",
            lambda _, name, wait_s, then: waits.update({name: (wait_s, then)}),
        )
        with silent_server() as silent:
            async with watching([silent, *nameservers]) as watcher:
                await until(lambda: watcher._untried == {silent})
                assert watcher.cache.version == 0
                wait_s, settle = waits["settle"]
                assert wait_s == route_watcher.SETTLE_S
                settle()
                await watcher.ready(WAIT_S)
                assert [each.name for each in watcher.cache.brokers] == ["a", "c"]


async def test_killing_one_of_two_nameservers_disturbs_nothing():
    async with running() as one, running() as two:
        nameservers = [one.address, two.address]
        topics = ["t"]
        async with (
            registered(lambda: broker(topics=topics), nameservers) as registration,
            watching(nameservers) as watcher,
        ):
            await watcher.wait_for(knows("t"), WAIT_S)
            followed = one if one.servicer.watchers else two
            await followed.kill()
            topics.append("u")
            registration.changed()
            await watcher.wait_for(knows("u"), WAIT_S)
            assert watcher.cache.route("t") is not None


async def test_what_a_dead_nameserver_said_counts_for_a_while_only(monkeypatch):
    """When all else is quiet, the watcher's own clock ends it."""
    monkeypatch.setattr("duemq.transport.routing.route_views.STALE_MS", 50)
    async with (
        running() as one,
        running() as two,
        registered(lambda: broker("a"), [two.address]),
    ):
        await until(lambda: two.registry.brokers)
        one.registry.register(Version(1, 1), BrokerReport("c", "c:1"), one.clock.now_ms())
        async with watching([one.address, two.address]) as watcher:
            await until(lambda: len(watcher.cache.brokers) == 2)
            await one.kill()
            await until(lambda: [each.name for each in watcher.cache.brokers] == ["a"])
            assert "(out of reach: " in watcher.story()


async def test_without_any_nameserver_the_cache_stays_and_a_restart_restores_everything():
    async with running() as one, running() as two:
        nameservers = [one.address, two.address]
        topics = ["t"]
        async with (
            registered(lambda: broker(topics=topics), nameservers),
            watching(nameservers) as watcher,
        ):
            await watcher.wait_for(knows("t"), WAIT_S)
            await one.kill()
            await two.kill()
            await until(lambda: not watcher.live)
            assert watcher.cache.route("t") is not None
            topics.append("u")
            await one.start()
            await two.start()
            await watcher.wait_for(knows("u"), WAIT_S)


async def test_a_watcher_prefers_a_nameserver_that_is_ready():
    async with running(ready_after=3600.0) as fresh, running() as old:
        nameservers = [fresh.address, old.address]
        async with registered(broker, nameservers), watching(nameservers) as watcher:
            await watcher.wait_for(knows("t"), WAIT_S)


async def test_nobody_to_ask_is_unavailable_and_named():
    async with watching(["127.0.0.1:1"]) as watcher:
        with pytest.raises(errors.Unavailable, match=r"no nameserver answered \(127\.0\.0\.1:1\)"):
            await watcher.ready(0.3)


async def test_a_route_that_does_not_come_is_a_timeout(nameserver):
    async with watching([nameserver.address]) as watcher:
        await watcher.ready(WAIT_S)
        with pytest.raises(errors.Timeout):
            await watcher.wait_for(knows("t"), 0.05)


async def test_a_process_expires_gets_ready_and_stops():
    clock, stop = Clock(), asyncio.Event()
    settings = Settings(listen="127.0.0.1:0", ready_after=0.0, drain_timeout=0.0)
    nameserver = process.Nameserver(settings, clock)
    await nameserver.start(announced=False)
    running = asyncio.create_task(nameserver.run(stop))
    address = nameserver.server.address
    async with channel.connect(address) as connection:
        await NameserverStub(connection).Register(register(broker(), expiry_ms=1))
    async with watching([address]) as watcher:
        await watcher.wait_for(knows("t"), WAIT_S)
        clock.ms += 1
        await watcher.wait_for(lacks("t"), WAIT_S)
        stop.set()
        await running
        await nameserver.stop()
    assert nameserver.server.draining.is_set()


async def test_how_long_the_silent_and_the_lost_are_known_follows_the_settings():
    clock = Clock()
    settings = Settings(listen="127.0.0.1:0", ready_after=2.0, expiry=3.0, lost_kept=5.0)
    registry = process.Nameserver(settings, clock).registry
    assert registry.ready_at_ms == clock.now_ms() + 2_000
    assert (registry.expiry_ms, registry.lost_kept_ms) == (3_000, 5_000)


async def test_a_process_that_was_stopped_before_it_was_ready_is_not_so_at_once():
    clock = Clock()
    settings = Settings(listen="127.0.0.1:0", ready_after=1.5, drain_timeout=0.0)
    nameserver = process.Nameserver(settings, clock)
    ready_at_ms = nameserver.registry.ready_at_ms
    await nameserver.start(announced=False)
    try:
        async with channel.connect(nameserver.server.address) as connection:
            stub = NameserverStub(connection)
            request = health_pb2.HealthCheckRequest(service=SERVICE.full_name)
            health = health_pb2_grpc.HealthStub(connection).Watch(request)
            assert (await health.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
            clock.ms += 60_000
            await until(lambda: nameserver.registry.ready_at_ms > ready_at_ms)
            with pytest.raises(errors.NotReady):
                await status.answer(stub.GetCluster(pb.GetClusterRequest()))
            clock.ms = nameserver.registry.ready_at_ms
            assert (await health.read()).status == health_pb2.HealthCheckResponse.SERVING
            await status.answer(stub.GetCluster(pb.GetClusterRequest()))
    finally:
        await nameserver.stop()


@pytest.mark.long
async def test_a_peer_that_froze_is_noticed(nameserver):
    """By both kinds of channels, within WAIT_S: gRPC itself would wait for a minute and more."""
    async with (
        link_to(nameserver.address) as link,
        watching([link.address]) as watcher,
        channel.connect(link.address) as connection,
    ):
        stream = NameserverStub(connection).WatchRoutes(pb.WatchRoutesRequest())
        await stream.read()
        await watcher.ready(WAIT_S)
        link.swallow()
        await until(lambda: not watcher.live)
        await until(stream.done)


@pytest.mark.long
async def test_a_quiet_watch_pings_and_is_not_turned_away(nameserver, monkeypatch):
    for patience in (
        "grpc.keepalive_timeout_ms",
        "grpc.http2.ping_timeout_ms",
        "grpc.min_reconnect_backoff_ms",  # of a connection attempt
    ):  # the link is in this process, and slow when that is starved
        assert patience in channel._NAMESERVER_OPTIONS
        monkeypatch.setitem(channel._NAMESERVER_OPTIONS, patience, int(WAIT_S * 1_000))
    monkeypatch.setattr(route_watcher, "FIRST_UPDATE_TIMEOUT_S", WAIT_S)
    async with link_to(nameserver.address) as link, watching([link.address]) as watcher:
        await watcher.ready(WAIT_S)
        quiet = link.sent + 1  # the client's acknowledgement of settings may be on its way
        await until(lambda: link.sent >= quiet + PINGS_TURNED_AWAY)
        assert (link.opened, watcher.live) == (1, True)
