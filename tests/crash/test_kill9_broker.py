"""kill -9 of a real broker under load: all that it acknowledged is there, once, in order.

The client does what the SDK does: it repeats whatever it has no answer for.
CRASH_ROUNDS sets how often each case is repeated, CRASH_SEED when the process is killed.
"""

import asyncio
import os
import random
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import grpc.aio
import pytest

from duemq.errors import TopicNotFound
from duemq.transport import channel
from duemq.v1 import broker_pb2
from tests.service.running_broker import Client, batch

ROUNDS = int(os.environ.get("CRASH_ROUNDS", "1"))
SEED = int(os.environ.get("CRASH_SEED", str(random.randrange(1 << 32))))
START_TIMEOUT_S = 60
KILLS = 3
LANES = 3
TOPIC = "orders"


class BrokerProcess:
    """`duemq-broker` on a data directory, to be killed and started again."""

    def __init__(self, data_dir: Path, *flags: str) -> None:
        self.data_dir = data_dir
        self._flags = flags
        self._process: Process | None = None
        self.address = ""
        self.log = ""

    async def start(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            *(
                sys.executable,
                "-m",
                "duemq_server.local_cluster.child",
                "duemq_server.broker",
                "--name",
                "b1",
                "--data-dir",
                str(self.data_dir),
            ),
            *("--listen", "127.0.0.1:0", "--nameservers", "127.0.0.1:1"),
            *("--segment-bytes", "1MiB", "--checkpoint-interval", "200ms"),
            *self._flags,
            stdin=PIPE,  # it ends with this process
            stdout=PIPE,
            stderr=PIPE,
        )
        assert self._process.stdout
        line = await asyncio.wait_for(self._process.stdout.readline(), START_TIMEOUT_S)
        if not line:
            assert self._process.stderr
            self.log = (await self._process.stderr.read()).decode()
            await self._process.wait()
            return
        self.address = line.split(b'"')[-2].decode()
        self._errors = asyncio.create_task(self._read_errors())

    async def _read_errors(self) -> None:
        assert self._process
        assert self._process.stderr
        self.log = (await self._process.stderr.read()).decode()

    async def kill(self, number: int = signal.SIGKILL) -> int:
        """The exit status."""
        assert self._process
        with suppress(ProcessLookupError):
            self._process.send_signal(number)
        status = await self._process.wait()
        if self.address:
            await self._errors
        self.address = ""
        return status

    @property
    def status(self) -> int | None:
        assert self._process
        return self._process.returncode


class Lane:
    """One producer of one queue.  What it sent is a function of the number."""

    def __init__(self, queue_id: int) -> None:
        self.queue_id = queue_id
        self.acknowledged = 0
        self.sent = 0

    def bodies(self, number: int) -> list[bytes]:
        randomness = random.Random(f"{self.queue_id}-{number}")
        size = randomness.choice((1, 100, 5_000))
        return [
            b"%d-%d-%d" % (self.queue_id, number, n) + bytes(size)
            for n in range(randomness.randint(1, 20))
        ]

    def batch(self, number: int) -> broker_pb2.Batch:
        return batch(
            TOPIC,
            self.bodies(number),
            queue_id=self.queue_id,
            producer_id=1 + self.queue_id,
            sequence=number,
        )

    async def send(self, client: Client) -> None:
        """Sends until the broker is gone."""
        stream = client.broker.SendStream()
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            self.sent = self.acknowledged
            in_flight = 0
            while True:
                request = broker_pb2.SendRequest(batches=[self.batch(self.sent)])
                self.sent += 1
                in_flight += 1
                await stream.write(request)
                while in_flight >= 4:
                    answer = await stream.read()
                    if answer is grpc.aio.EOF:
                        return
                    assert not answer.results[0].HasField("error"), answer
                    self.acknowledged += 1
                    in_flight -= 1

    async def check(self, client: Client) -> None:
        """Repeats what is in doubt; then everything is there once and in order."""
        try:
            found = await client.bodies(TOPIC, self.queue_id)
        except TopicNotFound:  # killed before the first batch was durable
            found = []
        expected = self._all(self.acknowledged)
        assert found[: len(expected)] == expected
        beyond = [self._all(n) for n in range(self.acknowledged, self.sent + 1)]
        assert found in beyond
        for number in range(max(0, self.acknowledged - 3), self.sent):
            [result] = await client.send(self.batch(number))
            assert not result.HasField("error")
            assert result.duplicate == (len(self._all(number)) < len(found))
        self.acknowledged = self.sent
        assert await client.bodies(TOPIC, self.queue_id) == self._all(self.sent)

    def _all(self, count: int) -> list[bytes]:
        return [body for number in range(count) for body in self.bodies(number)]


@pytest.fixture
def randomness(request: pytest.FixtureRequest) -> random.Random:
    print(f"CRASH_SEED={SEED}")
    return random.Random(f"{SEED}-{request.node.name}")


@pytest.fixture
async def broker(tmp_path: Path) -> AsyncIterator[BrokerProcess]:
    made = BrokerProcess(tmp_path)
    yield made
    if made.status is None:
        await made.kill()


@pytest.mark.cluster
@pytest.mark.parametrize("round", range(ROUNDS))
async def test_kill9_loses_and_repeats_nothing(
    broker: BrokerProcess, randomness: random.Random, round: int
) -> None:
    lanes = [Lane(queue_id) for queue_id in range(LANES)]
    await broker.start()
    for _ in range(KILLS):
        async with channel.connect(broker.address) as connection:
            sending = [asyncio.create_task(lane.send(Client(connection))) for lane in lanes]
            await asyncio.sleep(randomness.uniform(0.05, 0.6))
            await broker.kill()
            await asyncio.gather(*sending)
        await broker.start()
        assert broker.address, broker.log
        async with channel.connect(broker.address) as connection:
            for lane in lanes:
                await lane.check(Client(connection))
    assert sum(lane.acknowledged for lane in lanes)
    assert await broker.kill(signal.SIGTERM) == 0, broker.log
    assert "Traceback" not in broker.log


async def filled(broker: BrokerProcess) -> list[bytes]:
    """A killed broker's directory with one lane's batches in it."""
    lane = Lane(0)
    await broker.start()
    async with channel.connect(broker.address) as connection:
        for number in range(100):
            await Client(connection).send(lane.batch(number))
    await broker.kill()
    return lane._all(100)


def last_segment(data_dir: Path) -> Path:
    return sorted(path for path in (data_dir / "commitlog").iterdir() if path.name.isdigit())[-1]


@pytest.mark.cluster
async def test_a_flipped_byte_before_valid_data_refuses_to_start(
    broker: BrokerProcess, tmp_path: Path
) -> None:
    await filled(broker)
    segment = last_segment(tmp_path)
    data = bytearray(segment.read_bytes())
    at = len(bytes(data).rstrip(b"\0")) // 2
    data[at] ^= 1
    segment.write_bytes(data)
    await broker.start()
    assert not broker.address
    assert broker.status == 1
    assert str(segment) in broker.log
    assert "offset" in broker.log
    assert "duemq-storage" in broker.log
    assert segment.read_bytes() == data


@pytest.mark.cluster
async def test_a_torn_tail_is_cut_and_kept_aside(broker: BrokerProcess, tmp_path: Path) -> None:
    bodies = await filled(broker)
    segment = last_segment(tmp_path)
    data = segment.read_bytes()
    end = len(data.rstrip(b"\0"))
    torn = b"\x01\x02\x03\x04" + data[4:64]
    with segment.open("r+b") as file:
        file.seek(-(-end // 8) * 8)
        file.write(torn)
    await broker.start()
    async with channel.connect(broker.address) as connection:
        assert await Client(connection).bodies(TOPIC) == bodies
    await broker.kill()
    [aside] = (tmp_path / "commitlog").glob("*.broken-*")
    assert aside.read_bytes().rstrip(b"\0") == torn.rstrip(b"\0")
