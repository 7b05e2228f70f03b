"""The key index of a running broker: built behind what is stored, and never missed by a look-up."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from duemq.v1 import admin_pb2
from duemq_server.broker.process import Broker
from duemq_server.broker.store.keys.key_builder import TEMPORARY, KeyBuilder, KeySpan
from duemq_server.storage.errors import CorruptFile, DiskFull
from tests.service.running_broker import Client, running_broker
from tests.service.running_cluster import until
from tests.service.test_broker_message_admin import find, record, send
from tests.unit.broker.short_spans import SPAN, short_spans

KEYS = 5


@pytest.fixture(autouse=True)
def _short_spans() -> Iterator[None]:
    with short_spans():
        yield


@pytest.fixture
async def started(tmp_path: Path) -> AsyncIterator[tuple[Broker, Client]]:
    async with running_broker(tmp_path) as made:
        yield made


async def fill(client: Client, count: int = 3 * SPAN + 1) -> None:
    records = [record(f"m{number}", f"k{number % KEYS}") for number in range(count)]
    await send(client, "orders", *records)


async def built(broker: Broker, runs: int) -> list[Path]:
    """A checkpoint, and what is built after it."""
    await broker._checkpoints.save()
    [queue, *_] = broker.store.queues_of("orders")
    await until(lambda: len(queue.keys) == runs)
    return runs_in(broker)


def runs_in(broker: Broker) -> list[Path]:
    return sorted(Path(broker.settings.data_dir).rglob("*.keys"))


async def found(client: Client) -> list[list[tuple[int, int, str]]]:
    return [await find(client, "orders", key=f"k{number}") for number in range(KEYS + 1)]


async def test_the_same_is_found_with_the_index_as_without(
    started: tuple[Broker, Client],
) -> None:
    broker, client = started
    await fill(client)
    without = await found(client)
    assert sum(map(len, without)) == 3 * SPAN + 1
    assert len(await built(broker, 3)) == 3
    assert await found(client) == without
    assert await find(client, "orders", key="k1", limit=1) == without[1]


async def test_a_damaged_run_is_done_without_and_built_anew(
    started: tuple[Broker, Client],
) -> None:
    broker, client = started
    await fill(client)
    without = await found(client)
    runs = await built(broker, 3)
    sound = [run.read_bytes() for run in runs]
    runs[0].write_bytes(sound[0][:-1] + b"\xff")
    runs[1].write_bytes(b"")
    runs[2].unlink()
    assert await found(client) == without
    assert runs_in(broker) == []
    assert [run.read_bytes() for run in await built(broker, 3)] == sound
    assert await found(client) == without


async def test_a_start_keeps_the_runs_and_removes_what_a_crash_left(tmp_path: Path) -> None:
    async with running_broker(tmp_path) as (broker, client):
        await fill(client)
        without = await found(client)
        await built(broker, 3)
    (tmp_path / TEMPORARY).write_bytes(b"half of a run")
    async with running_broker(tmp_path) as (broker, client):
        assert not (tmp_path / TEMPORARY).exists()
        assert len(broker.store.queue("orders", 0).keys) == 3
        assert await found(client) == without


async def test_runs_go_with_their_topic(started: tuple[Broker, Client]) -> None:
    broker, client = started
    await fill(client)
    assert await built(broker, 3)
    await client.admin.DeleteTopic(admin_pb2.DeleteTopicRequest(name="orders"))
    await broker._checkpoints.save()
    assert runs_in(broker) == []


async def test_it_is_measured(started: tuple[Broker, Client]) -> None:
    broker, client = started
    await fill(client)
    await built(broker, 3)

    def said(name: str) -> float | None:
        return broker.server.registry.get_sample_value(f"duemq_broker_{name}")

    await until(lambda: (said("key_runs"), said("key_runs_missing")) == (3, 0))


async def test_without_space_it_waits(
    started: tuple[Broker, Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    broker, client = started
    build = KeyBuilder.build
    refused: list[int] = []

    def full(_: KeyBuilder, span: KeySpan) -> bool:
        refused.append(span.base)
        raise DiskFull("no space")

    monkeypatch.setattr(KeyBuilder, "build", full)
    await fill(client)
    await broker._checkpoints.save()
    await until(lambda: bool(refused))
    assert set(refused) == {2 * SPAN}
    monkeypatch.setattr(KeyBuilder, "build", build)
    assert len(await built(broker, 3)) == 3


async def test_a_span_that_cannot_be_read_does_not_hold_up_the_others(
    started: tuple[Broker, Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    broker, client = started
    build = KeyBuilder.build

    def broken(self: KeyBuilder, span: KeySpan) -> bool:
        if span.base == SPAN:
            raise CorruptFile("queue", 0, "entries are missing", "")
        return build(self, span)

    monkeypatch.setattr(KeyBuilder, "build", broken)
    await fill(client)
    await built(broker, 2)
    monkeypatch.setattr(KeyBuilder, "build", build)
    assert len(await built(broker, 3)) == 3
