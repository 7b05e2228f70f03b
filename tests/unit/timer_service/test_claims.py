"""When a shard claims again, against a loop whose time is a number."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from duemq.errors import (
    DuemqError,
    FencedTimer,
    InvalidArgument,
    OffsetOutOfRange,
    TopicNotFound,
    Unavailable,
)
from duemq.protocol.route import Broker, LostBroker, RouteCache, Update
from duemq.v1 import broker_pb2
from duemq_server.broker.store import offsets as broker_offsets
from duemq_server.broker.store.offsets import GroupOffset, GroupQueue
from duemq_server.timer_service.disk.place import check
from duemq_server.timer_service.edge import broker_link, broker_links
from duemq_server.timer_service.edge.broker_link import (
    CHECK_TIMEOUT_S,
    CLAIM_RETRY_S,
    COMMIT_INTERVAL_S,
    EMPTY_LOOK_S,
    BrokerLink,
)
from duemq_server.timer_service.edge.broker_links import BrokerLinks
from duemq_server.timer_service.edge.timer_fetcher import (
    FETCH_WAIT_MS,
    RETRY_S_MAX,
    RETRY_S_MIN,
    TimerFetcher,
)
from duemq_server.timer_service.far.numbering import Numbering, Source
from duemq_server.timer_service.scheduling.clocks import FRESH_MS, SLACK_MS, BrokerClock
from duemq_server.timer_service.scheduling.dispatch import Dispatcher
from duemq_server.timer_service.scheduling.holding.holds import Holds
from duemq_server.timer_service.timers.log_entries import SourceId
from tests.crash.faulty_disk import FaultyDisk
from tests.manual_loop import ManualLoop
from tests.played_log_loop import LOG_LOOP, no_loop_fails

__all__ = ["no_loop_fails"]

MINUTE_S = 60.0
TOO_MANY = 200


class Leaving:
    """The links of a shard that leaves."""

    place = SimpleNamespace(leaves=True)
    epoch = 0

    def __init__(self) -> None:
        self.empty = False
        self.noted = False

    async def before_leaving(self) -> None:
        self.noted = True

    def turn(self, _: BrokerLink) -> "Leaving":
        return self

    async def __aenter__(self) -> None: ...

    async def __aexit__(self, *_: object) -> None: ...

    def claims_changed(self) -> None: ...

    def say(self, *_: object) -> None: ...


class Link(BrokerLink):
    """To a broker that answers as it is told."""

    answer: DuemqError | None = None

    def __init__(self, links: Leaving) -> None:
        shard: Any = SimpleNamespace(log_loop=LOG_LOOP)
        to: Any = links
        super().__init__(to, shard, Broker("b", "127.0.0.1:1", 7))
        self.told: list[bool] = []

    async def _claim(self) -> None:
        self.told.append(self._links.empty)
        assert len(self.told) < TOO_MANY  # in no time
        if self.answer is not None:
            raise self.answer
        self._told_empty = self._links.empty


@pytest.mark.parametrize("answer", [Unavailable("away"), FencedTimer("another one")])
def test_a_shard_that_left_and_is_empty_does_not_claim_all_the_time(answer: DuemqError) -> None:
    """Nobody hears that it is: its broker is away, or refuses it."""
    with ManualLoop(0) as loop:

        async def main() -> list[bool]:
            links = Leaving()
            links.empty = True
            link = Link(links)
            link.answer = answer
            await loop.silence(MINUTE_S)
            told = list(link.told)
            link.answer = None
            await loop.silence(CLAIM_RETRY_S[1] + 1)
            assert link.told[len(told) :] == [True]
            link.end()
            return told

        assert len(loop.run_until_complete(main())) < TOO_MANY - 1


def test_a_shard_that_left_tells_at_once_that_it_is_empty() -> None:
    with ManualLoop(0) as loop:

        async def main() -> None:
            links = Leaving()
            link = Link(links)
            await loop.silence(EMPTY_LOOK_S)
            assert link.told == [False]
            links.empty = True
            await loop.silence(EMPTY_LOOK_S)
            assert link.told == [False, True]
            link.end()

        loop.run_until_complete(main())


@pytest.mark.parametrize("wakes", [BrokerLink.ask_for_time, lambda link: link.serve(4)])
def test_what_cannot_wait_for_the_next_claim_is_claimed_at_once(
    wakes: Callable[[BrokerLink], None],
) -> None:
    """Its clock, once this machine's was set; and queues that were not known."""
    with ManualLoop(0) as loop:

        async def main() -> None:
            links = Leaving()
            links.place = SimpleNamespace(leaves=False, has=lambda queue_id: True)
            link = Link(links)
            await loop.silence(EMPTY_LOOK_S)
            assert len(link.told) == 1
            wakes(link)
            await loop.silence(EMPTY_LOOK_S)
            assert len(link.told) == 2
            link.end()

        loop.run_until_complete(main())


def test_an_answer_about_a_queue_that_was_not_committed_ends_no_commits() -> None:
    """The broker would keep all delayed messages from then on."""
    asked: list[int] = []

    async def answer(request: broker_pb2.CommitOffsetsRequest) -> Any:
        asked.extend(each.queue_id for each in request.commits)
        results = [broker_pb2.OffsetResult(queue_id=each, offset=5) for each in (3, 0)]
        return broker_pb2.CommitOffsetsResponse(queues=results)

    with ManualLoop(0) as loop:

        async def main() -> None:
            link = Link(Leaving())
            stub: Any = SimpleNamespace(CommitOffsets=lambda request, timeout: answer(request))
            link._broker_now = lambda: stub
            link._shard = SimpleNamespace(directory=SimpleNamespace(producer_id=1))  # type: ignore[assignment]
            new = {0: 5}
            link._not_committed = lambda: new  # type: ignore[method-assign]
            await loop.silence(COMMIT_INTERVAL_S * 2.5)
            assert asked == [0, 0]
            assert link._committed == {0: 5}
            link.end()

        loop.run_until_complete(main())


@pytest.mark.parametrize("leaves", [False, True])
def test_a_stop_waits_for_no_space_on_a_full_disk(leaves: bool) -> None:
    with ManualLoop(0) as loop:

        async def never(_: int) -> None:
            await asyncio.Event().wait()

        async def main() -> None:
            links = Leaving()
            links.place = SimpleNamespace(leaves=leaves, has=lambda queue_id: False)
            links.service = None  # type: ignore[attr-defined]
            link = Link(links)
            source = Source(SourceId(0, 0), "b", 1, 0)
            link._shard = SimpleNamespace(  # type: ignore[assignment]
                log_loop=SimpleNamespace(durable=never),
                directory=SimpleNamespace(log=SimpleNamespace(end_position=1)),
                scheduler=SimpleNamespace(numbers=SimpleNamespace(sources=[source])),
            )
            stopping = asyncio.create_task(link.stop())
            await loop.silence(MINUTE_S)
            assert stopping.done()
            await stopping

        loop.run_until_complete(main())


def test_a_broker_hears_how_far_its_queues_were_taken_over() -> None:
    """Its data may be from an older copy: it would give those offsets to other messages."""
    asked: list[broker_pb2.ClaimTimerQueuesRequest] = []

    async def answer(request: broker_pb2.ClaimTimerQueuesRequest) -> Any:
        asked.append(request)
        return broker_pb2.ClaimTimerQueuesResponse(store_id=9)

    with ManualLoop(0) as loop:

        async def main() -> None:
            links = Leaving()
            links.place = SimpleNamespace(leaves=False, has=lambda queue_id: queue_id < 2)
            links.service = broker_pb2.TimerService()  # type: ignore[attr-defined]
            link = Link(links)
            link.broker = Broker("b", "127.0.0.1:1", store_id=9)
            numbers = Numbering()
            for queue_id, end in ((0, 5), (2, 7)):
                number = numbers.number_source(SourceId(9, queue_id), "b", 0)
                source = numbers.sources[number]
                source.next_offset = source.durable_offset = end
            numbers.sources[0].next_offset = 6
            stub: Any = SimpleNamespace(ClaimTimerQueues=lambda request, timeout: answer(request))
            link._broker_now = lambda: stub
            link._shard = SimpleNamespace(  # type: ignore[assignment]
                scheduler=SimpleNamespace(numbers=numbers, keyed=SimpleNamespace(formers=()))
            )
            await link._ask([0, 1])
            link.end()

        loop.run_until_complete(main())
    [request] = asked
    assert {each.queue_id: each.offset for each in request.ends} == {0: 5, 2: 7}
    assert request.store_id == 9  # another one at the address has other messages there


def test_who_is_at_the_address_is_asked_of_each_connection_that_is_sent_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another broker may be by now, which would store what is sent."""
    streams: list[Any] = []
    asked: list[tuple[object, ...]] = []

    def stream(*arguments: object) -> Any:
        streams.append(arguments)
        return SimpleNamespace(end=lambda: None)

    async def ask(*arguments: object) -> Any:
        assert links.noted, "queues are handed over, and it is not noted that it leaves"
        asked.append(arguments)
        return broker_pb2.ClaimTimerQueuesResponse()

    async def learn(_: int) -> None: ...

    links = Leaving()
    monkeypatch.setattr(broker_link, "FireStream", stream)
    monkeypatch.setattr(broker_link.stubs, "BrokerStub", lambda connection: connection)
    with ManualLoop(0) as loop:

        async def main() -> None:
            links.keep_time, links.learn = lambda: None, learn  # type: ignore[attr-defined]
            link = Link(links)
            link.broker = Broker("b", "127.0.0.1:1", store_id=9)
            link._ask = ask  # type: ignore[assignment, method-assign]
            fetcher: Any = SimpleNamespace(claims=0)
            link._queues, link.fetchers = [0], {0: fetcher}
            await BrokerLink._claim(link)
            assert fetcher.claims == 1
            [(*_, check, meant)] = streams
            assert meant == (("duemq-store-id", "9"),)
            await check("a connection")
            assert asked == [([0],), ([0], "a connection", CHECK_TIMEOUT_S)]
            link.end()

        loop.run_until_complete(main())


def test_another_broker_at_the_address_does_not_say_that_there_is_no_topic(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is to be kept for it would be refused for good."""

    async def describe(_: object, metadata: object = (), **options: object) -> Any:
        raise (Unavailable if metadata == (("duemq-store-id", "9"),) else TopicNotFound)("t")

    stub = SimpleNamespace(DescribeTopic=describe)
    monkeypatch.setattr(broker_link.stubs, "BrokerAdminStub", lambda _: stub)
    with ManualLoop(0) as loop:

        async def main() -> None:
            link: Any = Link(Leaving())
            link.broker = Broker("b", "127.0.0.1:1", store_id=9)
            link._channel, link._broker_now = "a connection", lambda: None
            with pytest.raises(Unavailable):
                await link.has_topic("t")
            link.end()

        loop.run_until_complete(main())


def test_a_queue_that_ends_sooner_than_was_taken_over_is_claimed_and_ends_if_it_stays_so() -> None:
    async def nothing_new() -> Any:
        return broker_pb2.FetchFramesResponse(store_id=7)

    async def away() -> Any:
        raise Unavailable("away")

    async def out_of_range(_: object) -> Any:
        raise OffsetOutOfRange("offset: 7 is not kept: 0 to 3 are", field="offset")

    async def ends_at_3() -> Any:
        return broker_pb2.GetOffsetsResponse(queues=[broker_pb2.OffsetResult(max_offset=3)])

    with ManualLoop(0) as loop:

        async def main() -> None:
            claimed = asyncio.Event()
            source = Source(SourceId(7, 0), "b", 7, 0)
            shard: Any = SimpleNamespace(
                log_loop=LOG_LOOP,
                scheduler=SimpleNamespace(numbers=SimpleNamespace(source=lambda _: source)),
                directory=SimpleNamespace(producer_id=1),
            )
            stub: Any = SimpleNamespace(
                FetchFrames=lambda request, **_: out_of_range(request),
                GetOffsets=lambda request, **_: ends_at_3(),
            )
            answers = asyncio.Event()

            def claim() -> None:
                claimed.set()
                fetcher.claims += answers.is_set()

            fetcher = TimerFetcher(shard, "b", lambda: stub, source.id, 0, claim)
            links: Any = SimpleNamespace(
                by_name={"b": SimpleNamespace(fetchers={0: fetcher}, held_up="", waits={})}
            )
            assert not [*BrokerLinks._waits(links)]
            assert fetcher.doubted is not None  # nothing is committed before it has answered
            await loop.silence(RETRY_S_MIN)
            assert claimed.is_set()
            [problem] = BrokerLinks._waits(links)
            assert problem == "queue 0 of broker b stands still: offset: 7 is not kept: 0 to 3 are"
            stub.FetchFrames = lambda request, **_: nothing_new()
            await loop.silence(2 * RETRY_S_MAX)
            assert not fetcher.problem
            assert fetcher.doubted is None
            stub.FetchFrames = lambda request, **_: out_of_range(request)
            await loop.silence(FETCH_WAIT_MS / 1_000 + MINUTE_S)
            assert fetcher.problem
            assert not fetcher.put_back  # it has not heard yet what was taken over, or is another
            answers.set()
            stub.FetchFrames = lambda request, **_: away()
            await loop.silence(MINUTE_S)
            fetcher.claims += 1  # before it was put back
            await loop.silence(RETRY_S_MAX)
            answers.clear()
            stub.FetchFrames = lambda request, **_: out_of_range(request)
            await loop.silence(MINUTE_S)
            assert not fetcher.put_back
            answers.set()
            await loop.silence(3 * RETRY_S_MAX)
            [problem] = BrokerLinks._waits(links)
            assert "it has offsets up to 3, and those up to 7 were taken over, so" in problem
            await fetcher.stop()

        loop.run_until_complete(main())


def test_what_another_broker_keeps_at_the_address_is_passed_over_by_nobody() -> None:
    """A queue goes on behind what its own broker keeps no more, once that has answered."""
    asked: list[int] = []

    async def out_of_range(request: broker_pb2.FetchFramesRequest) -> Any:
        asked.append(request.offset)
        raise OffsetOutOfRange("offset: 7 is not kept: 20 to 30 are", field="offset")

    async def keeps() -> Any:
        kept = broker_pb2.OffsetResult(min_offset=20, max_offset=30)
        return broker_pb2.GetOffsetsResponse(queues=[kept])

    with ManualLoop(0) as loop:

        async def main() -> None:
            source = Source(SourceId(7, 0), "b", 7, 0)
            shard: Any = SimpleNamespace(
                log_loop=LOG_LOOP,
                scheduler=SimpleNamespace(numbers=SimpleNamespace(source=lambda _: source)),
                directory=SimpleNamespace(producer_id=1),
            )
            stub: Any = SimpleNamespace(
                FetchFrames=lambda request, **_: out_of_range(request),
                GetOffsets=lambda request, **_: keeps(),
            )
            fetcher = TimerFetcher(shard, "b", lambda: stub, source.id, 0, lambda: None)
            await loop.silence(MINUTE_S)
            assert set(asked) == {7}
            fetcher.claims += 1
            await loop.silence(3 * RETRY_S_MAX)
            assert asked[-1] == 20
            await fetcher.stop()

        loop.run_until_complete(main())


def test_a_frame_whose_first_messages_have_offsets_of_others_ends_a_queue() -> None:
    """A broker from an older copy gave them again, before it heard of that."""

    async def inside(_: object) -> Any:
        raise InvalidArgument("offset: 7 is inside the frame that begins at 5", field="offset")

    with ManualLoop(0) as loop:

        async def main() -> None:
            source = Source(SourceId(7, 0), "b", 7, 0)
            shard: Any = SimpleNamespace(
                log_loop=LOG_LOOP,
                scheduler=SimpleNamespace(numbers=SimpleNamespace(source=lambda _: source)),
                directory=SimpleNamespace(producer_id=1),
            )
            stub: Any = SimpleNamespace(FetchFrames=lambda request, **_: inside(request))

            def claim() -> None:
                fetcher.claims += 1

            fetcher = TimerFetcher(shard, "b", lambda: stub, source.id, 0, claim)
            await loop.silence(1)
            assert "offset: 7 is inside the frame that begins at 5, so" in fetcher.put_back
            assert not fetcher.problem
            await fetcher.stop()

        loop.run_until_complete(main())


class Offsets:
    """A broker's, of one queue."""

    def __init__(self, offset: int) -> None:
        self.kept = broker_offsets.Offsets()
        self.kept.put(QUEUE, GroupOffset(offset, 0))
        self.late: list[broker_pb2.OffsetCommit] = []
        """Commits that were given up, and are on their way yet."""
        self.gives_up = False

    async def CommitOffsets(
        self, request: broker_pb2.CommitOffsetsRequest, **_: object
    ) -> broker_pb2.CommitOffsetsResponse:
        if self.gives_up:
            self.late += request.commits
            raise Unavailable("no answer")
        assert request.store_id == 7  # of the broker that was asked, not of who has its address
        [commit] = request.commits
        return broker_pb2.CommitOffsetsResponse(queues=[self.put(commit)])

    def put(self, commit: broker_pb2.OffsetCommit) -> broker_pb2.OffsetResult:
        assert commit.HasField("known_offset")
        stands = self.kept.commit(QUEUE, 0, commit.offset, 1_000, commit.known_offset)
        self.kept.put(QUEUE, stands)
        return broker_pb2.OffsetResult(queue_id=commit.queue_id, offset=stands.offset)

    @property
    def offset(self) -> int:
        found = self.kept.find(QUEUE)
        assert found is not None
        return found.offset


QUEUE = GroupQueue("%TIMER%", "%TIMER%", 0)


def committing(broker: Offsets, source: SimpleNamespace, epoch: int = 0) -> Link:
    link, played = Link(Leaving()), cast(Any, broker)
    link._links.epoch = epoch  # type: ignore[misc]
    link._broker_now = lambda: played
    link.broker = Broker("b", "127.0.0.1:1", store_id=7)
    numbers = SimpleNamespace(source=lambda _: source)
    shard = SimpleNamespace(
        directory=SimpleNamespace(producer_id=1), scheduler=SimpleNamespace(numbers=numbers)
    )
    link._shard = cast(Any, shard)
    fetcher = SimpleNamespace(begin=0, source=SourceId(7, 0), doubted=None)
    link.fetchers = {0: cast(Any, fetcher)}
    return link


@pytest.mark.parametrize("first", [True, False])
def test_a_commit_that_was_given_up_and_comes_late_moves_nothing_back(first: bool) -> None:
    """Who replaces a data directory that is lost begins there: the rest would come twice."""
    broker, source = Offsets(0), SimpleNamespace(durable_offset=3)
    with ManualLoop(0) as loop:

        async def main() -> None:
            link = committing(broker, source)
            if not first:
                await loop.silence(COMMIT_INTERVAL_S * 1.5)
                source.durable_offset = 5
            broker.gives_up = True
            await loop.silence(COMMIT_INTERVAL_S * 1.5)
            broker.gives_up, source.durable_offset = False, 9
            await loop.silence(COMMIT_INTERVAL_S * 1.5)
            assert broker.offset == 9
            assert broker.late
            for commit in broker.late:
                broker.put(commit)
            assert broker.offset == 9
            link.end()

        loop.run_until_complete(main())


def test_who_goes_on_with_a_copy_has_the_broker_keep_what_it_lacks() -> None:
    broker, source = Offsets(9), SimpleNamespace(durable_offset=3)
    with ManualLoop(0) as loop:

        async def main() -> None:
            link = committing(broker, source)
            await loop.silence(COMMIT_INTERVAL_S * 1.5)
            assert broker.offset == 3
            source.durable_offset = 5
            await loop.silence(COMMIT_INTERVAL_S)
            assert broker.offset == 5
            link.end()

        loop.run_until_complete(main())


def test_a_broker_that_was_put_back_keeps_what_is_not_fetched() -> None:
    """Its own commits are of its copy; ours are of what it gave before, under the same offsets."""
    broker, source = Offsets(1), SimpleNamespace(durable_offset=3)
    with ManualLoop(0) as loop:

        async def main() -> None:
            link = committing(broker, source)
            link.fetchers[0].doubted = 0
            await loop.silence(COMMIT_INTERVAL_S * 1.5)
            assert broker.offset == 1
            link.end()

        loop.run_until_complete(main())


def test_a_replica_that_was_deposed_moves_nothing_back() -> None:
    broker, source = Offsets(9), SimpleNamespace(durable_offset=3)
    with ManualLoop(0) as loop:

        async def main() -> None:
            link = committing(broker, source, epoch=4)
            await loop.silence(COMMIT_INTERVAL_S * 1.5)
            source.durable_offset = 5
            await loop.silence(COMMIT_INTERVAL_S * 3)
            assert broker.offset == 9
            link.end()

        loop.run_until_complete(main())


def test_what_waited_while_a_broker_refused_the_shard_is_sent_when_that_is_over() -> None:
    """Also to brokers that nothing new is sent to, which would wake their streams."""
    kicked: list[str] = []

    def played(name: str, refused: FencedTimer | None) -> Any:
        def kick() -> None:
            kicked.append(name)

        return SimpleNamespace(refused=refused, holds_timers=lambda: True, kick=kick)

    with ManualLoop(0) as loop:

        async def main() -> None:
            dispatcher = Dispatcher(Holds())
            scheduler = SimpleNamespace(dispatcher=dispatcher)
            shard: Any = SimpleNamespace(log_loop=LOG_LOOP, scheduler=scheduler)
            nothing: Any = None
            links = BrokerLinks(shard, RouteCache(), nothing, nothing)
            links.by_name = {"b1": played("b1", FencedTimer("other")), "b2": played("b2", None)}
            links.claims_changed()
            assert dispatcher.fence
            kicked.clear()

            links.by_name["b1"].refused = None
            links.claims_changed()

            assert not dispatcher.fence
            assert kicked == ["b1", "b2"]
            links._clocks.cancel()

        loop.run_until_complete(main())


@pytest.mark.parametrize(
    ("shards", "store", "forgotten", "granted", "told"),
    [
        (1, 7, False, None, True),
        (1, 7, False, False, True),
        (1, 7, False, True, False),
        (1, 7, True, None, False),
        (1, 8, False, None, False),
        (2, 7, False, None, False),
    ],
)
def test_who_leaves_names_brokers_that_are_away_and_have_not_got_their_queues_back(
    shards: int, store: int, forgotten: bool, granted: bool | None, told: bool
) -> None:
    """Once it is stopped and forgotten, nobody would hand them over."""
    routes = RouteCache()
    lost = LostBroker(Broker("b1", "b:1", store_id=store), 0, stopped=True, forgotten=forgotten)
    routes.apply(Update(whole=True, lost_brokers=(lost,)))
    with ManualLoop(0) as loop:

        async def main() -> None:
            numbers = SimpleNamespace(sources=[SimpleNamespace(id=SourceId(7, 1))])
            scheduler = SimpleNamespace(numbers=numbers)
            shard: Any = SimpleNamespace(log_loop=LOG_LOOP, scheduler=scheduler)
            settings: Any = SimpleNamespace(clock_difference_max=1.0)
            place = check("/data", FaultyDisk(), 1, shards, may_leave=True)
            links = BrokerLinks(shard, routes, settings, place)
            links._clocks.cancel()
            if granted is not None:
                link: Any = SimpleNamespace(granted=granted)
                links.by_name = {"b1": link}
            found = list(links._not_handed_over())
            assert [each.startswith("broker b1 is away") for each in found] == [True] * told

        loop.run_until_complete(main())


def test_a_broker_that_is_gone_says_nothing_of_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was never ahead of that one; for good, as long as the process ran."""
    behind: list[int] = []
    gone, there = BrokerClock(), BrokerClock()
    gone.observe(1_000, 1_000, 0)
    there.observe(61_000, 56_000, FRESH_MS)
    with ManualLoop(0) as loop:

        async def main() -> None:
            firing = SimpleNamespace(keep_behind=behind.append)
            shard: Any = SimpleNamespace(log_loop=LOG_LOOP, firing=firing)
            nothing: Any = None
            links = BrokerLinks(shard, RouteCache(), nothing, nothing)
            links._clocks.cancel()
            clocks = {"gone": gone, "there": there}
            links.by_name = {
                name: cast(Any, SimpleNamespace(clock=clocks[name])) for name in clocks
            }
            for steady_ms in (FRESH_MS - 1, FRESH_MS, 3 * FRESH_MS):  # nobody answers in the end
                monkeypatch.setattr(broker_links, "steady_ms", lambda now=steady_ms: now)
                links.keep_time()
                if steady_ms == FRESH_MS:
                    del links.by_name["gone"]

        loop.run_until_complete(main())
    assert behind == [0, 5_000 - SLACK_MS]
