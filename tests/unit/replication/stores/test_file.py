"""The store of one machine, used by several processes at a time."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from duemq_server.replication.protocol import record as records
from duemq_server.replication.stores import file as files
from duemq_server.replication.stores.file import FileStore
from duemq_server.replication.stores.store import Conflict, StoreError
from tests.unit.replication.stores.contract import (
    RECORD,
    WAIT_S,
    A,
    B,
    OpenStore,
    StoreContract,
    found,
)

PROCESSES = 4
SWAPS = 40

IMPORTS = """
import sys
from duemq_server.replication.protocol import record as records
from duemq_server.replication.protocol.record import ReplicaId
from duemq_server.replication.stores import file as files
from duemq_server.replication.stores.file import FileStore
from duemq_server.replication.stores.store import Conflict
files.LOCK_WAIT_S = 60.0  # others take it all the time, on a disk that may be slow
store = FileStore(sys.argv[1], "g")
leader = ReplicaId("a", "a" * 32)
"""
COUNTER = """
done = 0
while done < int(sys.argv[2]):
    found = store.read()
    try:
        store.swap(found.version, records.with_in_sync(found.record, found.record.in_sync))
        done += 1
        print(done, flush=True)
    except Conflict:
        pass
"""
LEADER = """
for line in sys.stdin:
    store.renew(leader) if line == "renew\\n" else store.release(leader)
    print("done", flush=True)
"""


@pytest.fixture
def open_store(tmp_path: Path) -> Iterator[OpenStore]:
    with ExitStack() as stack:

        def open_() -> FileStore:
            store = FileStore(str(tmp_path), "g")
            stack.callback(store.close)
            return store

        yield open_


@pytest.fixture
def store(open_store: Callable[[], FileStore]) -> FileStore:
    return open_store()


class TestFileStore(StoreContract):
    """Of a directory."""


@pytest.fixture
def processes() -> Iterator[list[subprocess.Popen[str]]]:
    started: list[subprocess.Popen[str]] = []
    yield started
    for process in started:
        process.kill()
        process.wait(WAIT_S)
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


def start(
    processes: list[subprocess.Popen[str]], code: str, *arguments: object
) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", IMPORTS + code, *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    processes.append(process)
    return process


def tell(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(line + "\n")
    process.stdin.flush()
    assert process.stdout.readline() == "done\n"


def test_no_version_comes_again_after_the_record_was_removed(
    store: FileStore, tmp_path: Path
) -> None:
    first = store.swap(None, RECORD)
    (tmp_path / "g.record").unlink()
    with pytest.raises(Conflict) as conflict:
        store.swap(first, RECORD)
    assert conflict.value.found is None
    assert store.swap(None, RECORD) != first


def test_groups_lie_side_by_side(store: FileStore, tmp_path: Path) -> None:
    store.swap(None, RECORD)
    other = FileStore(str(tmp_path), "h")
    assert other.read() is None
    for name in ("", "a/b", ".."):
        with pytest.raises(ValueError, match="names no group"):
            FileStore(str(tmp_path), name)


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b'{"version":"v","record":{"format":9}}'])
def test_a_damaged_record_is_an_error_and_is_not_replaced(
    data: bytes, store: FileStore, tmp_path: Path
) -> None:
    (tmp_path / "g.record").write_bytes(data)
    with pytest.raises(StoreError, match=r"g\.record"):
        store.read()
    with pytest.raises(StoreError):
        store.swap(None, RECORD)
    assert (tmp_path / "g.record").read_bytes() == data


def test_no_change_of_several_processes_is_lost(
    store: FileStore, tmp_path: Path, processes: list[subprocess.Popen[str]]
) -> None:
    store.swap(None, RECORD)
    for _ in range(PROCESSES):
        start(processes, COUNTER, tmp_path, SWAPS)
    for process in processes:
        process.communicate(timeout=WAIT_S)
        assert process.returncode == 0
    assert found(store).record.revision == RECORD.revision + PROCESSES * SWAPS


def test_a_process_that_is_killed_holds_nobody_up_and_loses_nothing(
    store: FileStore, tmp_path: Path, processes: list[subprocess.Popen[str]]
) -> None:
    store.swap(None, RECORD)
    before = RECORD.revision
    for round_ in range(5):
        process = start(processes, COUNTER, tmp_path, 1_000_000)
        assert process.stdout is not None
        said = [int(process.stdout.readline()) for _ in range(3 + round_)]
        process.kill()
        said += [int(line) for line in process.stdout.read().split()]
        process.wait(WAIT_S)
        # It may have been killed between a swap and its word of it.
        after = found(store).record.revision
        assert after - before in (said[-1], said[-1] + 1)
        store.swap(found(store).version, replace(found(store).record, revision=after))
        before = after


def test_who_holds_the_lock_for_too_long_makes_the_store_away(
    store: FileStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = store.swap(None, RECORD)
    monkeypatch.setattr(files, "LOCK_WAIT_S", 0.0)
    with store._locked():
        assert found(store).version == version  # reads need no lock
        with pytest.raises(StoreError, match="is locked"):
            store.swap(version, RECORD)
    store.swap(version, RECORD)


# -- the lease


def test_a_lease_ends_with_its_process(
    store: FileStore, tmp_path: Path, processes: list[subprocess.Popen[str]]
) -> None:
    store.swap(None, RECORD)
    leader = start(processes, LEADER, tmp_path)
    assert found(store).lease is None
    assert not found(store).dead  # it has not begun
    tell(leader, "renew")
    first = found(store).lease
    assert first is not None
    assert not found(store).dead
    assert found(store).lease == first
    tell(leader, "renew")
    assert found(store).lease not in (None, first)
    leader.kill()
    leader.wait(WAIT_S)
    assert found(store).lease is None
    assert found(store).dead
    again = start(processes, LEADER, tmp_path)
    tell(again, "renew")
    assert found(store).lease not in (None, first)


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that has a block can be written; one that has none gets none."""
    pwrite = os.pwrite

    def without_space(fd: int, data: bytes, offset: int) -> int:
        if not os.fstat(fd).st_size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwrite(fd, data, offset)

    monkeypatch.setattr(files.os, "pwrite", without_space)


@pytest.mark.usefixtures("full_disk")
@pytest.mark.parametrize("content", [b"7 00000000000000000001\n", b"4194304 %020d\n" % 10**19])
def test_a_lease_of_an_earlier_process_is_taken_on_a_full_disk(
    content: bytes, store: FileStore, open_store: OpenStore, tmp_path: Path
) -> None:
    """Its content may be of a release that wrote it shorter."""
    path = tmp_path / f"g.lease-{A.disk}"
    path.write_bytes(content)
    seen = set()
    for _ in range(2):
        store.renew(A)
        seen.add(path.read_text())
    assert [len(each.split()) for each in seen] == [2, 2]
    store.release(A)
    open_store().renew(A)
    assert path.read_text() not in (content.decode(), "")


@pytest.mark.usefixtures("full_disk")
def test_a_lease_that_finds_no_space_is_nobodys(store: FileStore, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="No space left"):
        store.renew(A)
    (path,) = tmp_path.glob("g.lease-*")
    with path.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_the_lease_of_a_process_that_is_stopped_stands_still(
    store: FileStore, tmp_path: Path, processes: list[subprocess.Popen[str]]
) -> None:
    version = store.swap(None, RECORD)
    leader = start(processes, LEADER, tmp_path)
    tell(leader, "renew")
    os.kill(leader.pid, signal.SIGSTOP)
    lease = found(store).lease
    assert lease is not None
    assert not found(store).dead
    assert found(store).lease == lease
    # Somebody else takes over meanwhile, and has a lease of its own.
    store.renew(B)
    store.swap(version, replace(RECORD, leader=B, epoch=5))
    assert found(store).lease not in (None, lease)
    os.kill(leader.pid, signal.SIGCONT)
    tell(leader, "renew")
    assert found(store).record.leader == B


def test_the_file_says_what_the_record_says(store: FileStore, tmp_path: Path) -> None:
    version = store.swap(None, RECORD)
    fields = json.loads((tmp_path / "g.record").read_bytes())
    assert fields == {"version": version, "record": json.loads(records.encode(RECORD))}
