import subprocess
from types import SimpleNamespace

import pytest

from duemq.errors import Rejected
from duemq_analytics import __main__ as command
from duemq_analytics import lake_commands, session
from duemq_analytics.progress import StepProgress


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ('openjdk version "17.0.15" 2025-04-15', 17),
        ('openjdk version "21" 2023-09-19', 21),
        ('java version "1.8.0_402"', 8),
        ("no java here", None),
    ],
)
def test_the_major_version_is_found(text, version):
    assert session.java_version(text) == version


def test_a_missing_java_says_what_to_do(monkeypatch, tmp_path):
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(session.JavaMissing, match="Spark needs Java 17 or newer"):
        session.require_java()


def test_an_old_java_is_named(monkeypatch, tmp_path):
    java = tmp_path / "bin" / "java"
    java.parent.mkdir()
    java.write_text("#!/bin/sh\necho 'java version \"1.8.0_402\"' >&2\n")
    java.chmod(0o755)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(session.JavaMissing, match=r"bin/java is 8"):
        session.require_java()


@pytest.mark.parametrize(
    ("arguments", "given"),
    [
        ("", False),
        ("--conf spark.app.name=--master pyspark-shell", False),
        ("--master spark://h:7077 pyspark-shell", True),
        ("--master=yarn pyspark-shell", True),
    ],
)
def test_a_master_in_the_environment_is_seen(monkeypatch, arguments, given):
    monkeypatch.setenv("PYSPARK_SUBMIT_ARGS", arguments)
    assert session.master_in_arguments() is given


def refused(*_):
    raise ConnectionRefusedError(111, "Connection refused")


@pytest.mark.parametrize(
    ("code", "said"),
    [(-9, "Java.*ended by signal 9"), (3, "Java.*exit code 3"), (None, "Connection refused")],
)
def test_a_java_that_was_killed_is_told_and_not_taken_for_a_server(
    code, said, monkeypatch, tmp_path
):
    def wait(timeout_s):
        if code is None:
            raise subprocess.TimeoutExpired("java", timeout_s)
        return code

    gateway = SimpleNamespace(proc=SimpleNamespace(wait=wait))
    spark = SimpleNamespace(sparkContext=SimpleNamespace(_gateway=gateway), stop=refused)
    monkeypatch.setattr(session, "start", lambda *_: spark)
    with pytest.raises(Rejected, match=said):
        lake_commands.with_spark("a job", tmp_path, refused, StepProgress(quiet=True))


@pytest.mark.parametrize(
    ("arguments", "reads"),
    [
        (["report", "--lake", "{}", "--output", "{}/out"], False),
        (["report", "--spans", "{}/spans", "--output", "{}/out"], False),
        (["compact", "--lake", "{}"], False),
        (["land", "--once", "--output", "{}"], True),
    ],
)
def test_who_reads_no_topic_starts_no_python_for_it(arguments, reads, tmp_path, monkeypatch):
    started = []

    def start(*_, sources=True, **options):
        started.append(sources)
        raise OSError(28, "No space left")

    monkeypatch.setattr(session, "start", start)
    monkeypatch.setattr(session, "require_java", lambda: 17)
    for name in ("_batches", "spans"):
        (tmp_path / name).mkdir()
    assert command.main([each.format(tmp_path) for each in arguments]) == 1
    assert started == [reads]
