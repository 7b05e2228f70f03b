"""Logs of members: bounded in size and number, and no line lost."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from duemq_server.local_cluster import log_files

WAIT_S = 60
# A member that logs until it has all files, and says how much.
PROGRAM = """
import os, sys
from duemq_server.local_cluster import child, log_files
log_files.LOG_BYTES_MAX, child.LOOK_S = 1_000, 0.001
child.main()
"""
LOGGING = """
import os, signal, sys
path, number = sys.argv[1], 0
while not os.path.exists(path + ".4"):
    number += 1
    print(f"line {number:06d}", file=sys.stderr, flush=True)
print(number, flush=True)
signal.pause()
"""


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_files, "LOG_BYTES_MAX", 10)


def opened(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)


@pytest.mark.usefixtures("small")
def test_a_full_file_is_put_behind_and_the_oldest_goes(tmp_path: Path) -> None:
    path = tmp_path / "broker-0.log"
    fd = opened(path)
    for number in range(8):
        assert not log_files.turn_over(str(path), fd)
        os.write(fd, b"line %d long enough" % number)
        assert log_files.turn_over(str(path), fd)
    os.write(fd, b"short")
    os.close(fd)
    texts = {each.name: each.read_text() for each in tmp_path.iterdir()}
    assert texts == {
        "broker-0.log": "short",
        **{f"broker-0.log.{n}": f"line {8 - n} long enough" for n in range(1, 5)},
    }


@pytest.mark.usefixtures("small")
def test_without_space_for_a_file_it_goes_on_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "broker-0.log"
    fd = opened(path)
    os.write(fd, b"line 0 long enough")

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(log_files.os, "open", full)
        with pytest.raises(OSError, match="No space"):
            log_files.turn_over(str(path), fd)
    os.write(fd, b", line 1")
    os.close(fd)
    assert path.read_text() == "line 0 long enough, line 1"
    assert [each.name for each in tmp_path.iterdir()] == ["broker-0.log"]


def test_a_child_keeps_its_own_log_bounded_and_loses_no_line(tmp_path: Path) -> None:
    path = tmp_path / "member.log"
    (tmp_path / "logging_program.py").write_text(LOGGING)
    command = [sys.executable, "-c", PROGRAM, "--log", str(path), "logging_program", str(path)]
    with path.open("ab") as log:
        child = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env={**os.environ, "PYTHONPATH": str(tmp_path)},
        )
    assert child.stdout is not None
    last = int(child.stdout.readline())
    child.communicate(timeout=WAIT_S)  # its standard input ends, and so does it
    files = [path.with_name(f"member.log.{n}") for n in range(4, 0, -1)] + [path]
    written = "".join(file.read_text() for file in files).splitlines()
    assert written == [f"line {n:06d}" for n in range(last - len(written) + 1, last + 1)]
    assert len(list(tmp_path.glob("member.log*"))) == 5
