"""What a type checker says of programs: the right ones pass, wrong callbacks do not."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
README = ROOT / "sdk" / "README.md"
FROM_NPM = ROOT / "tests" / "pyright" / "node_modules" / ".bin" / "pyright"  # make clients
PYRIGHT = shutil.which("pyright") or shutil.which(FROM_NPM)

GOOD = """
from __future__ import annotations

from typing import assert_type

import duemq
from duemq import Message, aio
from duemq.descriptions import TopicSummary
from duemq.errors import NotAllSent
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
    options: duemq.SendOptions = {"key": "k", "delay": "1h"}
    producer.send("t", b"x", **options)
    try:
        producer.send_many("t", [b"x", duemq.Outgoing(b"y", key="k")], tag="t")
    except NotAllSent as error:
        stored: duemq.Receipt = error.receipts[0]
        why: duemq.DuemqError = error.failures[0]
        lost_id: str = error.unsent[0].message_id

with duemq.Admin() as admin:
    assert_type(admin.create_topic("t", queues=4), TopicSummary)
    assert_type(admin.delete_topic("t"), None)
    assert_type(admin.topics(system=True), list[TopicSummary])
    assert_type(admin.find_messages("t", key="k", since="-1h").more, bool)
    assert_type(admin.cancel(receipt), duemq.CancelOutcome)
    assert_type(admin.cancel([receipt]), list[duemq.CancelOutcome])
    for letter in admin.dead_letters("g", limit=3):
        assert_type(letter.resent, bool)
    assert_type(admin.resend_dead_letters("g", on_sent=print).sent, int)

with duemq.PullConsumer("g") as reader:
    reader.assign(reader.queues("t"), start_from="earliest")
    reader.pause(*reader.assignment)
    assert_type(reader.poll(0.5), list[Message])


async def asks(admin: aio.Admin) -> None:
    assert_type(await admin.create_topic("t", queues=4), TopicSummary)
    assert_type(await admin.cancel([receipt]), list[duemq.CancelOutcome])
    async for letter in admin.dead_letters("g", limit=3):
        assert_type(letter.resent, bool)
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
    'duemq.Producer().send("t", b"x", dealy="5s")',
    'duemq.Producer().send("t", b"x", delay=b"5s")',
    'duemq.Producer().send_many("t", [b"x"], key=7)',
    'aio.Producer().send("t", b"x", tag=7)',
    'MemoryCluster().producer().submit("t", b"x", dealy="5s")',
    'duemq.PushConsumer("g", "t", one, thrads=3)',
    'duemq.Admin().create_topic("t", quues=4)',
    "duemq.Admin().create_topic(7)",
    "duemq.Admin().topics().name",
    'duemq.Admin().dead_letters("g", resent="no")',
    'duemq.Admin().resend_dead_letters("g", on_snt=print)',
    "duemq.Admin().cancel(7)",
    'duemq.PullConsumer().poll("1s")',
    'duemq.PullConsumer().pause("t")',
    "aio.Admin().delete_topic(7)",
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
def programs(tmp_path_factory):
    """A folder with the right, the wrong, and the README's program."""
    folder = tmp_path_factory.mktemp("typed")
    (folder / "good.py").write_text(GOOD)
    (folder / "bad.py").write_text(BAD_HEAD + "\n".join(BAD))
    [first, *_] = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    (folder / "readme.py").write_text(first)
    return folder


@pytest.fixture(scope="module")
def checked(programs):
    """Runs mypy once over all programs; answers file name → lines with errors."""
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--config-file=", "--no-incremental", "."],
        cwd=programs,
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


@pytest.mark.toolchain
@pytest.mark.skipif(PYRIGHT is None, reason="no pyright: make clients brings it where npm is")
def test_pyright_says_the_same(programs):
    (programs / "pyrightconfig.json").write_text(
        json.dumps({"extraPaths": [str(ROOT / "sdk")], "typeCheckingMode": "standard"})
    )
    done = subprocess.run(
        [PYRIGHT, "--outputjson", "--pythonpath", sys.executable],
        cwd=programs,
        capture_output=True,
        text=True,
        check=False,
    )
    found = {
        (Path(each["file"]).name, each["range"]["start"]["line"] + 1)
        for each in json.loads(done.stdout)["generalDiagnostics"]
        if each["severity"] == "error"
    }
    first = BAD_HEAD.count("\n") + 1
    assert found == {("bad.py", first + number) for number in range(len(BAD))}
