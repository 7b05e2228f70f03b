"""What a type checker says of programs: the right ones pass, wrong callbacks do not."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
README = ROOT / "sdk" / "README.md"

GOOD = """
from __future__ import annotations

import duemq
from duemq import Message, aio
from duemq.testing import MemoryCluster
from duemq.testing.aio import MemoryCluster as AioMemoryCluster


def one(message: Message) -> None: ...
def answers(message: Message) -> int: return 1
def many(messages: list[Message]) -> None: ...
def either(given: Message | list[Message]) -> None: ...
async def later(message: Message) -> None: ...
async def many_later(messages: list[Message]) -> None: ...
def lost(pending: duemq.PendingReceipt, error: duemq.DuemqError) -> None: ...
async def submits(producer: aio.Producer) -> duemq.Receipt:
    pending: aio.PendingReceipt = producer.submit("t", b"x")
    await producer.ready("t")
    return await producer.submit("t", pending.message_id.encode())

received: list[Message] = []
batch: bool = bool(received)

duemq.PushConsumer("g", "t", one)
duemq.PushConsumer("g", "t", print)
duemq.PushConsumer("g", "t", answers, start_from="-1h")
duemq.PushConsumer("g", "t", received.append)
duemq.PushConsumer("g", "t", received.extend, batch=True)
duemq.PushConsumer("g", ["t"], many, batch=True)
duemq.PushConsumer("g", {"t": "a || b"}, lambda message: message.body)
duemq.PushConsumer("g", "t", either, batch=batch)
aio.PushConsumer("g", "t", later, order="key")
aio.PushConsumer("g", "t", many_later, batch=True)
MemoryCluster().push_consumer("g", "t", one, order="queue")
MemoryCluster().push_consumer("g", "t", many, batch=True)
AioMemoryCluster().push_consumer("g", "t", later)

with duemq.Producer(on_error=lost) as producer:
    receipt: duemq.Receipt = producer.send("t", b"x", delay="1h")
    producer.submit("t", b"x").add_done_callback(lambda pending: print(pending.message_id))
    outcome: duemq.CancelOutcome = producer.cancel(receipt)
    outcomes: list[duemq.CancelOutcome] = producer.cancel([receipt, receipt.handle or ""])
    producer.cancel(list(producer.send_many("t", [b"x"], delay=1)))
"""

BAD = [
    'duemq.PushConsumer("g", "t", nothing)',
    'duemq.PushConsumer("g", "t", text)',
    'duemq.PushConsumer("g", "t", many)',
    'duemq.PushConsumer("g", "t", one, batch=True)',
    'duemq.PushConsumer("g", "t", 7)',
    'aio.PushConsumer("g", "t", many)',
    'aio.PushConsumer("g", "t", one, batch=True)',
    'MemoryCluster().push_consumer("g", "t", text)',
    'MemoryCluster().push_consumer("g", "t", one, batch=True)',
    'AioMemoryCluster().push_consumer("g", "t", nothing)',
    "duemq.Producer(on_error=text)",
    'duemq.Producer().submit("t", b"x").add_done_callback(text)',
    "duemq.Producer().cancel(7)",
    'aio.Producer().submit("t", b"x").offset',
]
BAD_HEAD = """
import duemq
from duemq import Message, aio
from duemq.testing import MemoryCluster
from duemq.testing.aio import MemoryCluster as AioMemoryCluster

def nothing() -> None: ...
def text(body: str) -> None: ...
def one(message: Message) -> None: ...
def many(messages: list[Message]) -> None: ...
"""


@pytest.fixture(scope="module")
def checked(tmp_path_factory):
    """Runs mypy once over all programs; answers file name → lines with errors."""
    folder = tmp_path_factory.mktemp("typed")
    (folder / "good.py").write_text(GOOD)
    (folder / "bad.py").write_text(BAD_HEAD + "\n".join(BAD))
    [first, *_] = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    (folder / "readme.py").write_text(first)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--config-file=", "--no-incremental", "."],
        cwd=folder,
        env={"MYPYPATH": str(ROOT / "sdk"), "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    found: dict[str, dict[int, str]] = {}
    for name, line, said in re.findall(
        r"^(\w+\.py):(\d+): error: (.*)$", done.stdout, re.MULTILINE
    ):
        found.setdefault(name, {}).setdefault(int(line), said)
    assert found, done.stdout + done.stderr
    return found


def test_right_programs_pass(checked):
    assert "good.py" not in checked, checked["good.py"]


def test_the_first_program_of_the_readme_passes(checked):
    assert "readme.py" not in checked, checked["readme.py"]


@pytest.mark.parametrize("line", BAD)
def test_wrong_programs_fail(checked, line):
    number = BAD_HEAD.count("\n") + 1 + BAD.index(line)
    assert number in checked["bad.py"]
