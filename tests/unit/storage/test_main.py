"""`duemq-storage` on a broker's directory."""

from __future__ import annotations

import errno
import os
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from duemq_server.storage import checkpoint, frame
from duemq_server.storage.__main__ import main
from duemq_server.storage.dirlock import DirLock
from duemq_server.storage.disk import RealDisk, RealFile
from duemq_server.storage.indexes import consume_queue, key_run
from duemq_server.storage.indexes.index import FixedIndex
from duemq_server.storage.log import SegmentedLog
from duemq_server.storage.record import Entry
from duemq_server.storage.tools.dump import describe

SEGMENT_BYTES = 1200
SIZES = struct.pack("<3I", 20, 21, 22)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A data directory with two topics, three segments, consume queues and a checkpoint."""
    disk = RealDisk()
    log = SegmentedLog.open(str(tmp_path / "commitlog"), disk, segment_bytes=SEGMENT_BYTES)
    assert list(log.recover()) == []
    indexes = {
        topic: FixedIndex(str(tmp_path / "consumequeue" / folder / "0"), disk, 32)
        for topic, folder in (("orders", "orders.7"), ("%TIMER%", "%TIMER%.1"))
    }
    for number in range(12):
        topic = "orders" if number % 2 else "%TIMER%"
        timed = {"due_ms": bytes(24), "target_topic": "orders"} if topic == "%TIMER%" else {}
        index = indexes[topic]
        parts = frame.encode_parts(
            topic=topic,
            queue_id=0,
            base_offset=index.end,
            store_ms=1_700_000_000_000 + number,
            sizes=SIZES,
            tag_hashes=bytes(12),
            key_hashes=bytes(12),
            payload=bytes(63),
            **timed,  # type: ignore[arg-type]
        )
        position, _ = log.append(frame.KIND, parts)
        log.write_pending()
        stored = frame.decode(log.read_entry(position).body)
        index.append(consume_queue.encode_frame(position, stored))
    log.append(4, [b"not a frame"])
    log.write_pending()
    for index in indexes.values():
        index.sync()
    checkpoint.save(str(tmp_path / "checkpoint"), b"state", disk)
    log.close()
    return tmp_path


def with_a_gap(data: Path) -> None:
    """Goes on with `orders` at offset 50."""
    disk = RealDisk()
    log = SegmentedLog.open(str(data / "commitlog"), disk, segment_bytes=SEGMENT_BYTES)
    assert list(log.recover(log.start_position))
    parts = frame.encode_parts(
        topic="orders",
        queue_id=0,
        base_offset=50,
        store_ms=1_700_000_000_100,
        sizes=SIZES,
        tag_hashes=bytes(12),
        key_hashes=struct.pack("<3I", 7, 0, 7),
        payload=bytes(63),
    )
    position, _ = log.append(frame.KIND, parts)
    log.write_pending()
    index = FixedIndex(str(data / "consumequeue" / "orders.7" / "0"), disk, 32)
    index.skip_to(50)
    index.append(consume_queue.encode_frame(position, frame.decode(log.read_entry(position).body)))
    index.sync()
    log.close()


def segments(data: Path) -> list[Path]:
    return sorted(p for p in (data / "commitlog").iterdir() if p.name.isdigit())


def flip(path: Path, offset: int, bits: int = 1) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= bits
    path.write_bytes(content)


def test_a_sound_directory(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(data)]) == 0
    out = capsys.readouterr().out
    assert "DAMAGE" not in out
    assert out.endswith("sound\n")
    assert f"{data}/consumequeue/orders.7/0: 18 entries" in out
    assert f"{data}/checkpoint: checkpoint of 5 bytes" in out


def test_damage_is_found_and_located(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flip(segments(data)[0], 100)
    assert main(["check", str(data)]) == 1
    assert f"DAMAGE  {segments(data)[0]}, offset 0" in capsys.readouterr().out


@pytest.mark.parametrize(
    "part",
    ["commitlog/0", "commitlog/durable", "checkpoint", "orders.7/0/0", ".keys"],
    ids=["log", "mark", "state", "queue", "run"],
)
def test_what_cannot_be_read_is_damage_and_all_else_is_looked_at(
    data: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    part: str,
) -> None:
    """A bad sector is what most people look for."""
    queue = data / "consumequeue" / "orders.7" / "0"
    run = queue / key_run.name_of(0)
    index = FixedIndex(str(queue), RealDisk(), 32)
    hashes = consume_queue.decode(index.read(0, 18))["key_hash"]
    entries = [key_run.entries_of(hashes, 0)]
    key_run.write(str(run), key_run.encode(0, 18, entries), RealDisk())
    (data / "consumequeue" / "a file of somebody's").touch()
    pread = RealFile.pread

    def failing(self: RealFile, length: int, offset: int, nowait: bool = False) -> memoryview:
        if part in self.path and (self.path.endswith(".keys") == (part == ".keys")):
            raise OSError(errno.EIO, os.strerror(errno.EIO), self.path)
        return pread(self, length, offset, nowait)

    monkeypatch.setattr(RealFile, "pread", failing)
    assert main(["check", str(data)]) == 1
    out = capsys.readouterr().out
    damage = [line for line in out.splitlines() if line.startswith("DAMAGE") and part in line]
    assert any("Input/output error" in line or "cannot be read" in line for line in damage)
    for found in (segments(data)[-1], data / "consumequeue" / "%TIMER%.1" / "0", queue, run):
        assert str(found) in out


def test_a_torn_tail_is_no_damage(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = SegmentedLog.open(str(data / "commitlog"), RealDisk(), segment_bytes=SEGMENT_BYTES)
    list(log.recover())
    log.close()
    with segments(data)[-1].open("ab") as file:
        file.write(b"garbage")
    assert main(["check", str(data)]) == 0
    assert "torn tail of 7 bytes" in capsys.readouterr().out


def test_a_lost_end_is_damage(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    segments(data)[-1].write_bytes(b"")
    assert main(["check", str(data)]) == 1
    assert "the log ends here, but was durable up to" in capsys.readouterr().out


def test_offsets_that_were_left_out_are_no_damage(
    data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with_a_gap(data)
    folder = data / "consumequeue" / "orders.7" / "0"
    keys = np.zeros(53, np.uint32)
    keys[[50, 52]] = 7
    run = key_run.entries_of(keys, 0)
    key_run.write(str(folder / key_run.name_of(0)), key_run.encode(0, 53, [run]), RealDisk())
    assert main(["check", str(data)]) == 0
    out = capsys.readouterr().out
    assert f"{folder}: 21 entries" in out
    assert "2 keys" in out
    flip(folder / f"{50:020d}", 40)
    assert main(["check", str(data)]) == 1
    assert f"DAMAGE  {folder}" in capsys.readouterr().out


def test_a_damaged_checkpoint_is_found(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flip(data / "checkpoint", 26)
    assert main(["check", str(data)]) == 1
    assert f"DAMAGE  {data}/checkpoint" in capsys.readouterr().out


@pytest.mark.parametrize(("entry", "bits"), [(5, 1), (3, 8)])  # within a frame; its first
@pytest.mark.parametrize("field", [0, 8, 12, 16, 24])
def test_a_consume_queue_that_does_not_fit_the_log_is_found(
    data: Path, capsys: pytest.CaptureFixture[str], field: int, entry: int, bits: int
) -> None:
    flip(data / "consumequeue" / "orders.7" / "0" / ("0" * 20), entry * 32 + field, bits)
    assert main(["check", str(data)]) == 1
    out = capsys.readouterr().out
    assert f"DAMAGE  {data}/consumequeue/orders.7/0" in out
    assert "remove this folder" in out
    assert "duemq-storage cut" not in out  # the log is sound


def test_consume_queues_may_reach_before_a_log_that_was_shortened(
    data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    segments(data)[0].unlink()
    assert main(["check", str(data)]) == 0


def test_a_dump_describes_every_entry(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dump", str(data / "commitlog")]) == 0
    out = capsys.readouterr().out
    assert out.count("kind=1") == 12
    assert "topic=orders queue=0 offset=3 count=3 payload_bytes=63" in out
    assert "target=orders/-1 due=1970-01-01T00:00:00.000+00:00" in out
    assert "kind=4 synced=" in out
    assert f"# {segments(data)[1]}" in out


def test_a_dump_tells_what_was_sent_back() -> None:
    parts = frame.encode_parts(
        topic="%DLQ%billing",
        queue_id=0,
        base_offset=0,
        store_ms=0,
        sizes=bytes(4),
        tag_hashes=bytes(4),
        key_hashes=bytes(4),
        payload=b"",
        send_back=True,
    )
    body = memoryview(b"".join(parts))
    line = describe(Entry(0, frame.KIND, body, 136, 0))
    assert line.endswith(" send_back")


def key_run_of(data: Path, key_hashes: list[int]) -> Path:
    """A run of the first six records of `orders`, which has no keys."""
    folder = data / "consumequeue" / "orders.7" / "0"
    path = folder / key_run.name_of(0)
    entries = key_run.entries_of(np.array(key_hashes, np.uint32), 0)
    key_run.write(str(path), key_run.encode(0, 6, [entries]), RealDisk())
    return path


def test_a_key_run_is_checked_and_dumped(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = key_run_of(data, [0] * 6)
    assert main(["check", str(data)]) == 0
    assert f"ok      {path}: 0 keys" in capsys.readouterr().out
    key_run_of(data, [0, 0, 5, 0, 0, 0])
    assert main(["check", str(data)]) == 1
    assert f"DAMAGE  {path}: differs from the consume queue" in capsys.readouterr().out
    assert main(["dump", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["key_run base=0 span=6 count=1", "key_hash=0x00000005 offset=2"]
    flip(path, 4100)
    assert main(["check", str(data)]) == 1
    assert f"DAMAGE  {path}, offset 4096: the CRC-32C of page 0" in capsys.readouterr().out


def test_a_dump_knows_every_kind_of_file(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dump", str(data / "checkpoint")]) == 0
    assert main(["dump", str(data / "commitlog" / "durable")]) == 0
    assert main(["dump", str(data / "consumequeue" / "orders.7" / "0" / ("0" * 20))]) == 0
    out = capsys.readouterr().out
    assert "checkpoint payload_bytes=5" in out
    assert "durable position=" in out
    assert "offset=17 position=" in out


def test_a_dump_shows_where_damage_starts_and_ends(
    data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flip(segments(data)[1], 100)
    assert main(["dump", str(segments(data)[1])]) == 0
    out = capsys.readouterr().out
    assert "offset=0 reason='CRC-32C" in out
    assert "valid_again_at=" in out


def test_after_a_cut_a_check_says_how_much_is_gone_until_the_next_start(
    data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = SegmentedLog.open_for_reading(str(data / "commitlog"), RealDisk())
    end, at = log.written_position, log.segments[1].start
    log.close()
    assert main(["cut", str(data / "commitlog"), "--at", str(at)]) == 0
    assert main(["check", str(data / "commitlog")]) == 1
    out = capsys.readouterr().out
    assert "the log ends here, but was durable up to" in out
    assert int(out.split("was durable up to ")[1].split()[0]) <= end


def test_a_cut_ends_the_log_and_keeps_the_rest(
    data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = str(data / "commitlog")
    log = SegmentedLog.open_for_reading(directory, RealDisk())
    entries = list(log.entries(0, int(segments(data)[2].name)))
    middle = next(e.position for e in entries if e.position > int(segments(data)[1].name))
    later = [p.name for p in segments(data)[2:]]
    flip(segments(data)[1], middle - int(segments(data)[1].name) + 40)

    assert main(["cut", directory, "--at", str(middle)]) == 0
    kept = capsys.readouterr().out
    assert f"{segments(data)[1]}.broken-{middle}" in kept
    for name in later:
        assert f"{directory}/{name}.broken-{int(name)}" in kept
    again = SegmentedLog.open(directory, RealDisk(), segment_bytes=SEGMENT_BYTES)
    assert [e.position for e in again.recover()] == [
        e.position for e in entries if e.position < middle
    ]
    assert again.end_position == middle


@pytest.mark.parametrize(
    ("position", "message"), [(8, "inside of an entry"), (10**6, "valid up to")]
)
def test_a_cut_needs_the_end_of_a_valid_entry(
    data: Path, capsys: pytest.CaptureFixture[str], position: int, message: str
) -> None:
    assert main(["cut", str(data / "commitlog"), "--at", str(position)]) == 2
    assert message in capsys.readouterr().err


def test_a_cut_is_refused_while_a_process_owns_the_directory(
    data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with DirLock(str(data)):
        assert main(["cut", str(data / "commitlog"), "--at", "0"]) == 1
    assert "in use by process" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["dump", "check"])
def test_a_path_that_is_not_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    assert main([command, str(tmp_path / "none")]) == 2
    assert "none" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["dump", "check"])
def test_who_has_read_enough_hears_nothing_more(data: Path, command: str) -> None:
    unread, output = os.pipe()
    os.close(unread)
    path = data / "commitlog" if command == "dump" else data
    try:
        done = subprocess.run(
            [sys.executable, "-m", "duemq_server.storage", command, str(path)],
            stdout=output,
            stderr=subprocess.PIPE,
            timeout=60,
            check=False,
        )
    finally:
        os.close(output)
    assert (done.returncode, done.stderr) == (2, b"")
