"""The heartbeats' loop, without a nameserver."""

import asyncio
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from duemq.errors import Internal
from duemq.transport import status
from duemq.v1 import nameserver_pb2
from duemq_server.serving.registration import Registration, _News

LONG_S = 3_600.0
WAIT_S = 30.0


@pytest.mark.parametrize("turns", range(5))
async def test_a_stop_that_meets_a_change_ends(turns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many turns of the event loop lie between the two."""
    beats = asyncio.Semaphore(0)

    async def beat(self: Registration, *_: object) -> float:
        beats.release()
        return LONG_S

    async def deregister(self: Registration, address: str) -> None:
        pass

    monkeypatch.setattr(Registration, "_beat", beat)
    monkeypatch.setattr(Registration, "_deregister", deregister)
    report = nameserver_pb2.BrokerReport(name="b1", address="127.0.0.1:1")
    registration = Registration(("127.0.0.1:1",), 1.0, 1, lambda: report)
    registration.start()
    await beats.acquire()
    await asyncio.sleep(0)  # it waits now
    registration.changed()
    for _ in range(turns):
        await asyncio.sleep(0)
    async with asyncio.timeout(WAIT_S):
        await registration.stop()


@pytest.mark.parametrize("drawn", [min, max])
async def test_heartbeats_come_sooner_than_a_nameserver_that_has_just_started_waits_for_them(
    drawn: Callable[[float, float], float], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It answers after a period, and who has not registered by then is not there."""

    async def accepted(_: object) -> nameserver_pb2.RegisterResponse:
        return nameserver_pb2.RegisterResponse(accepted=True)

    monkeypatch.setattr(random, "uniform", drawn)
    monkeypatch.setattr(status, "answer", accepted)
    report = nameserver_pb2.BrokerReport(name="b1", address="127.0.0.1:1")
    registration = Registration(("127.0.0.1:1",), LONG_S, 1, lambda: report)
    stub = SimpleNamespace(Register=lambda request, timeout: None)
    wait_s = await registration._beat(cast(Any, stub), _News("127.0.0.1:1", LONG_S))
    assert LONG_S / 2 < wait_s <= 0.9 * LONG_S


@pytest.mark.parametrize("deregister", [True, False])
async def test_who_has_a_successor_leaves_its_name_to_it(
    deregister: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    beats = asyncio.Semaphore(0)
    told: list[str] = []

    async def beat(self: Registration, *_: object) -> float:
        beats.release()
        return LONG_S

    async def tell(self: Registration, address: str) -> None:
        told.append(address)

    monkeypatch.setattr(Registration, "_beat", beat)
    monkeypatch.setattr(Registration, "_deregister", tell)
    report = nameserver_pb2.BrokerReport(name="b1", address="127.0.0.1:1")
    nameservers = ("127.0.0.1:1", "127.0.0.1:2")
    registration = Registration(nameservers, 1.0, 1, lambda: report)
    registration.start()
    for _ in nameservers:
        await beats.acquire()
    tasks = list(registration._tasks)
    await registration.stop(deregister=deregister)
    assert told == (list(nameservers) if deregister else [])
    assert all(task.done() for task in tasks)
    assert registration.refused.cancelled()


async def test_a_loop_that_fails_ends_the_process_and_not_the_heartbeats_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The nameserver would forget who lives, and nobody would come."""

    async def beat(self: Registration, *_: object) -> float:
        raise ZeroDivisionError

    monkeypatch.setattr(Registration, "_beat", beat)
    report = nameserver_pb2.BrokerReport(name="b1", address="127.0.0.1:1")
    registration = Registration(("127.0.0.1:1",), 1.0, 1, lambda: report)
    registration.start()
    with pytest.raises(Internal, match="registration failed"):
        async with asyncio.timeout(WAIT_S):
            await registration.refused
    await registration.stop(deregister=False)
