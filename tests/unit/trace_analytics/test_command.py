"""The command without Spark: what it says of failures, and how it takes paths."""

import errno
import io
import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
from click.testing import CliRunner
from pyspark.sql import SparkSession

from duemq.errors import InvalidArgument, Rejected
from duemq_analytics import __main__ as command
from duemq_analytics import failures, lake_commands, loading, options, output, session
from duemq_analytics.command import trace
from duemq_analytics.progress import StepProgress, bar

JAVA = """An error occurred while calling o198.getResult.
: org.apache.spark.SparkException: Exception thrown in awaitResult:
\tat org.apache.spark.util.SparkThreadUtils$.awaitResult(SparkThreadUtils.scala:70)
Caused by: org.apache.spark.SparkException: [FAILED_READ_FILE.NO_HINT] while reading file:/x.
\tat org.apache.spark.sql.errors.QueryExecutionErrors$.cannotReadFilesError(x.scala:856)
Caused by: java.io.IOException: could not read page
\t... 28 more
"""

PYTHON = """[PYTHON_EXCEPTION] An exception was thrown:
Traceback (most recent call last):
  File "client.py", line 1, in read
duemq.errors.OffsetOutOfRange: offset 0 is gone
"""

FULL = """[STREAM_FAILED] Query terminated with exception: Return Message: Traceback (most recent call last):
  File "landing.py", line 1, in land
    said(table.land(key))
         ^^^^^^^^^^^^^^^
pyspark.errors.exceptions.captured.PythonException: An exception was thrown from the Python worker:
Traceback (most recent call last):
  File "parquet_files.py", line 1, in finish
OSError: [Errno 28] No space left on device
 SQLSTATE: 39000
=== Streaming Query ===
"""  # noqa: E501


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (JAVA, "[FAILED_READ_FILE.NO_HINT] while reading file:/x. (java.io.IOException: could not"),
        (PYTHON, "offset 0 is gone"),
        (FULL, "OSError: [Errno 28] No space left on device"),
        (f"called o1.\n: x.SparkException: Lost task: {FULL}", "OSError: [Errno 28] No space left"),
        ("\n  Parquet magic bytes not found\nmore", "Parquet magic bytes not found"),
        ("called o1.\n: java.io.IOException: no\n\tat x", "java.io.IOException: no"),
        ("", "Spark failed"),
    ],
)
def test_a_failure_is_one_line(error, said):
    cause = failures.cause(error)
    assert cause.startswith(said)
    assert "\n" not in cause


def test_damaged_parquet_is_found_before_spark_starts(tmp_path, capsys):
    (tmp_path / "part.parquet").write_bytes(b"not Parquet")
    arguments = ["report", "--spans", str(tmp_path), "--output", str(tmp_path / "out")]
    assert command.main(arguments) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("trace report: --spans: ")
    assert "part.parquet" in line


@pytest.mark.parametrize("scheme", ["", "file:", "file://"])
def test_a_report_of_the_topic_does_not_take_the_place_of_what_was_landed(
    scheme, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(session, "require_java", lambda: pytest.fail("it goes on"))
    (tmp_path / "_batches").mkdir()
    assert command.main(["report", "--output", f"{scheme}{tmp_path}"]) == 2
    assert "is a lake" in capsys.readouterr().err


def landing(lake, monkeypatch, start):
    """The exit code of a landing job that does `start` instead of starting Spark."""
    monkeypatch.setattr(session, "start", start)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    return command.main(["land", "--once", "--output", str(lake)])


def test_a_landing_job_that_is_stopped_while_spark_starts_has_ended_well(tmp_path, monkeypatch):
    def start(*_, **options):
        lake_commands._stop(signal.SIGTERM, None)

    assert landing(tmp_path, monkeypatch, start) == 0


@pytest.mark.parametrize(
    ("error", "said", "code"),
    [(KeyboardInterrupt(), "interrupted", 130), (OSError(28, "No space left"), "No space left", 1)],
)
def test_what_ends_a_job_is_one_line(tmp_path, monkeypatch, capsys, error, said, code):
    def start(*_, **options):
        raise error

    assert landing(tmp_path, monkeypatch, start) == code
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("trace land: ")
    assert said in last


def test_what_is_gone_is_told_with_the_option_that_goes_on(tmp_path, monkeypatch, capsys):
    def start(*_, **options):
        raise Rejected("offset 0 does not exist (failOnDataLoss=false goes on)")

    assert landing(tmp_path, monkeypatch, start) == 1
    assert "(--skip-lost goes on)" in capsys.readouterr().err


def test_a_length_of_time_is_one_that_there_was(tmp_path, capsys):
    with pytest.raises(SystemExit):
        command.main(["report", "--lake", str(tmp_path), "--output", "x", "--since", "800000d"])
    assert "longer than 36,500 days" in capsys.readouterr().err


def test_what_the_job_takes_duemq_takes_too(tmp_path, monkeypatch):
    became = []
    monkeypatch.setattr(os, "execve", lambda _, arguments, environment: became.extend(arguments))
    given = ["--once", "--messages-per-batch", "12", "--skip-lost", "--output", str(tmp_path)]
    CliRunner().invoke(trace, ["land", *given], catch_exceptions=False)
    job = command._parser().parse_args(became[3:])
    assert (job.command, job.once, job.messages_per_batch, job.skip_lost) == (
        "land",
        True,
        12,
        True,
    )


@pytest.mark.parametrize("since", ["2h", "-2h"])
def test_how_long_ago_may_have_the_sign_of_other_commands(since, tmp_path, monkeypatch):
    became = []
    monkeypatch.setattr(os, "execve", lambda _, arguments, environment: became.extend(arguments))
    given = ["report", "--output", str(tmp_path), "--since", since]
    CliRunner().invoke(trace, given, catch_exceptions=False)
    assert command._parser().parse_args(became[3:]).since == timedelta(hours=2)


@pytest.mark.parametrize("name", ["report", "land"])
def test_a_nameserver_needs_no_port_as_of_other_commands(name, tmp_path, monkeypatch):
    became = []
    monkeypatch.setattr(os, "execve", lambda _, arguments, environment: became.extend(arguments))
    given = [name, "--nameserver", "ns-0,[::1]:1,[::1]", "--output", str(tmp_path)]
    CliRunner().invoke(trace, given, catch_exceptions=False)
    read = options.addresses(command._parser().parse_args(became[3:]).nameserver)
    assert read == ("ns-0:9876", "[::1]:1", "[::1]:9876")


@pytest.mark.parametrize(
    "given", [["report", "--since"], ["land", "--output=x", "--every"], ["compact", "--keep"]]
)
def test_a_wrong_length_of_time_is_told_in_the_command_s_words(given):
    with pytest.raises(InvalidArgument, match=f"^{given[-1]} 'soon' is no delay: "):
        CliRunner().invoke(trace, [*given, "soon"], catch_exceptions=False)


def test_ctrl_c_ends_a_job_in_a_line(tmp_path, monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "_report", interrupted)
    assert command.main(["report", "--output", str(tmp_path), "--json"]) == 130
    said = capsys.readouterr()
    assert said.err == "trace report: interrupted\n"
    assert json.loads(said.out) == {"error": {"code": "INTERRUPTED", "message": "interrupted"}}


LOADED = """
import runpy, signal, sys

class Interrupted:
    def find_spec(self, name, path=None, target=None):
        if name == "duemq_analytics.source_bench":
            signal.raise_signal(signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Interrupted())
sys.argv[1:] = ["report", "--help"]
runpy.run_module("duemq_analytics", run_name="__main__", alter_sys=True)
"""


def test_ctrl_c_while_a_job_is_loaded_ends_it_without_a_word():
    done = subprocess.run(
        [sys.executable, "-c", LOADED], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_once_it_is_loaded_ctrl_c_is_an_exception_again(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(os, "_exit", lambda code: pytest.fail("nothing was put away"))
    monkeypatch.setattr(command, "_report", lambda *_: signal.raise_signal(signal.SIGINT))
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        loading.begin()
        assert command.main(["report", "--output", str(tmp_path)]) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    assert capsys.readouterr().err == "trace report: interrupted\n"


def test_where_ctrl_c_is_ignored_it_stays_so(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "_exit", lambda code: pytest.fail("it is ignored"))
    monkeypatch.setattr(command, "_report", lambda *_: signal.raise_signal(signal.SIGINT))
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        loading.begin()
        assert command.main(["report", "--output", str(tmp_path)]) is None  # what the stub answers
    finally:
        signal.signal(signal.SIGINT, before)


def test_sigterm_is_as_it_was_where_it_is_ignored_and_in_other_threads():
    def within():
        with command._ended_by_sigterm():
            return signal.getsignal(signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    with ThreadPoolExecutor(1) as other:
        assert other.submit(within).result() is before
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        assert within() is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("name", ["report", "compact"])
def test_sigterm_leaves_no_temporary_files(name, tmp_path):
    """A service manager or a Job's deadline sends it; what is left would lie there for ever."""
    (tmp_path / "lake" / "_batches").mkdir(parents=True)
    (tmp_path / "tmp").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", TERMINATED, name, "--lake", tmp_path / "lake"]
        + (["--output", tmp_path / "out"] if name == "report" else []),
        env={**os.environ, "TMPDIR": str(tmp_path / "tmp")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (128 + signal.SIGTERM, ""), done.stderr
    assert not list((tmp_path / "tmp").iterdir())


# It comes while Spark has files there.
TERMINATED = """
import signal, sys
from duemq_analytics import __main__ as command, session

def start(name, scratch, **how):
    (scratch / "blockmgr").mkdir()
    signal.raise_signal(signal.SIGTERM)

session.start = start
sys.exit(command.main())
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_java_that_is_not_up_yet_ends_with_the_job(number, tmp_path):
    """It would wait for ever for who has started it."""
    (tmp_path / "lake" / "_batches").mkdir(parents=True)
    (tmp_path / "bin").mkdir()
    java = tmp_path / "bin" / "spark-submit"
    # Of pyspark's: what becomes Java.
    java.write_text(f"#!/bin/sh\necho $$ >{tmp_path}/pid; exec sleep 600\n")
    java.chmod(0o755)
    done = subprocess.run(
        [sys.executable, "-c", STARTING, "compact", "--lake", tmp_path / "lake"],
        env={**os.environ, "SPARK_HOME": str(tmp_path), "SIGNAL": str(int(number))},
        stderr=subprocess.DEVNULL,
        check=False,
    )
    pid = int((tmp_path / "pid").read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)  # of a test that fails nothing stays, either
    assert done.returncode == 128 + number


# The signal comes while pyspark waits for Java: while it forks, Python would lose it.
STARTING = """
import os
import signal
import sys
import time
from pathlib import Path
signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background it is ignored
from duemq_analytics import __main__ as command, session

def wait(_, nap=time.sleep):
    pid = Path(os.environ["SPARK_HOME"], "pid")
    while not (pid.exists() and pid.stat().st_size):
        nap(0.01)
    os.kill(os.getpid(), int(os.environ["SIGNAL"]))

time.sleep = wait
session.require_java = lambda: 17
sys.exit(command.main())
"""


def test_java_for_which_there_is_no_room_is_told(tmp_path, monkeypatch):
    """Limits of processes and memory are met here first."""

    def none_left(*_):
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(subprocess, "_fork_exec", none_left)
    monkeypatch.setattr(session, "require_java", lambda: 17)
    monkeypatch.setattr(session.java_archive, "place", lambda _: None)
    monkeypatch.setattr(session.java_archive, "using", lambda _: ())
    # Also where another test's Spark is there already.
    monkeypatch.setattr(SparkSession.Builder, "getOrCreate", lambda _: subprocess.Popen(["java"]))
    with pytest.raises(BlockingIOError):
        session.start("t", tmp_path)


def test_ctrl_c_waits_for_the_interpreter_of_the_job(tmp_path, monkeypatch):
    def waits():
        return signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ())

    became = []
    monkeypatch.setattr(os, "execve", lambda *_: became.append(waits()))
    CliRunner().invoke(trace, ["report", "--output", str(tmp_path)], catch_exceptions=False)
    assert became == [True]
    assert not waits()  # it could not become one


@pytest.mark.parametrize("number", ["0", "-1", "1.5", "1000000001", "x"])
def test_a_wrong_number_of_messages_is_told_before_spark_starts(number, tmp_path, capsys):
    given = ["land", "--output", str(tmp_path), "--messages-per-batch", number]
    with pytest.raises(SystemExit) as ended:
        command.main(given)
    assert ended.value.code == 2
    assert f"'{number}' is not a whole number from 1 to 1,000,000,000" in capsys.readouterr().err
    assert CliRunner().invoke(trace, given).exit_code == 2


@pytest.mark.parametrize(
    ("path", "uri"),
    [("report", False), ("/a/b:c", False), ("s3a://bucket/x", True), ("file:/x", True)],
)
def test_a_path_may_name_its_file_system(path, uri):
    assert output.is_uri(path) is uri
    assert output.child(path + "/", "t") == output.child(path, "t") == f"{path}/t"


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_terminal_shows_how_far_it_is():
    said, asked = Terminal(), iter([(0, 0), (3, 1_200)])
    progress = StepProgress(lambda: next(asked, (1_200, 1_200)), said, period_s=0.001)
    with progress.step("reading"):
        while "3 of 1,200 tasks" not in said.getvalue():
            pass
    assert said.getvalue().startswith("reading …")
    assert f"reading … {'·' * 24} 3 of 1,200 tasks" in said.getvalue()
    assert said.getvalue().splitlines()[-1].split("\x1b[K")[-1].startswith("reading: ")


def test_elsewhere_a_step_is_a_line_and_quiet_is_quiet():
    lines, quiet = io.StringIO(), io.StringIO()
    for progress in (StepProgress(None, lines), StepProgress(lambda: (1, 2), quiet, quiet=True)):
        with progress.step("reading"):
            pass
    assert lines.getvalue() == "reading …\n"
    assert quiet.getvalue() == ""


@pytest.mark.parametrize(
    ("done", "total", "cells"), [(0, 9, 0), (3, 6, 12), (5, 6, 20), (6, 6, 24), (7, 6, 24)]
)
def test_a_bar_is_as_full_as_what_is_done(done, total, cells):
    assert bar(done, total) == "█" * cells + "·" * (24 - cells)
