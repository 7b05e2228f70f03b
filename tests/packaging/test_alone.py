"""Each distribution, alone with what it requires in a fresh environment, does its work."""

import asyncio
import importlib.util
import json
import os
import subprocess
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.packaging.installing import PROJECTS, Environment
from tests.service.fake_cluster import FakeCluster

pytestmark = pytest.mark.long

Installed = Callable[..., Environment]
COMMAND_LINE = ("click", "rich", "duemq_cli")
SERVICES = ("duemq_server", "grpc_health", "lark", "numpy", "prometheus_client")
RULES = ("cronsim", "duemq_recurring")
SPARK = ("duemq_analytics", "jinja2", "matplotlib", "pyarrow", "pyspark")
ABSENT = {
    "duemq": ("opentelemetry.sdk", *COMMAND_LINE, *RULES, *SERVICES, *SPARK),
    "duemq-recurring": ("opentelemetry.sdk", *COMMAND_LINE, *SERVICES, *SPARK),
    "duemq-cli": (*RULES, *SERVICES, *SPARK),
    "duemq-server": (*COMMAND_LINE, *SPARK),
    "duemq-analytics": (
        *COMMAND_LINE,
        *RULES,
        "duemq_server",
        "grpc_health",
        "lark",
        "prometheus_client",
    ),
}
FOUND = """
import importlib.util, sys
for name in sys.argv[1:]:
    try:
        found = importlib.util.find_spec(name)
    except ModuleNotFoundError:
        found = None
    print(name, found is not None)
"""
SEND = """
import sys
import duemq
assert duemq.__file__.startswith(sys.prefix), duemq.__file__
assert duemq.__version__
for name in duemq.__all__:
    getattr(duemq, name)
with duemq.Producer(sys.argv[1]) as producer:
    print(producer.send("t", b"alone").offset, producer.send("t", b"late", delay="5s").handle)
"""
TEST = """
from duemq.testing import MemoryCluster
cluster = MemoryCluster()
cluster.producer().send("t", b"twin", delay="1d")
cluster.advance("1d")
print(cluster.messages("t")[0].body.decode())
"""
RULES_WORK = """
from duemq_recurring.occurrences import Occurrences, Recurrence
print(Occurrences("n", Recurrence(cron="0 8 * * *", zone="Europe/Berlin")).after(0).at_ms)
"""
TWIN_REPEATS = """
from duemq.testing import MemoryCluster
cluster = MemoryCluster()
cluster.create_topic("t")
try:
    cluster.put_schedule("s", topic="t", cron="@hourly", zone="Europe/Berlin")
except ImportError as error:
    print(error)
cluster.advance("1d")
print(len(cluster.messages("t")))
"""


@pytest.mark.parametrize("name", PROJECTS)
def test_what_it_does_not_need_is_not_there(name: str, installed: Installed) -> None:
    looked = installed(name).run("python", "-I", "-c", FOUND, *ABSENT[name])
    assert looked.stdout.split("\n")[:-1] == [f"{each} False" for each in ABSENT[name]], looked
    # They are here, so that the test can fail.
    assert [each for each in ABSENT[name] if importlib.util.find_spec(each) is None] == []


async def test_the_client_sends(installed: Installed) -> None:
    cluster = FakeCluster()
    await cluster.start("a")
    cluster.topic("t")
    program = ("-I", "-W", "error", "-c", SEND, cluster.nameserver)
    try:
        sent = await asyncio.to_thread(installed("duemq").run, "python", *program)
    finally:
        await cluster.stop()
    assert sent.returncode == 0, sent.stderr
    assert sent.stdout.startswith("0 dmq1")


def test_the_client_brings_its_twin_for_tests(installed: Installed) -> None:
    done = installed("duemq").run("python", "-I", "-W", "error", "-c", TEST)
    assert (done.stdout, done.stderr) == ("twin\n", "")


def test_the_twin_repeats_messages_with_its_extra(installed: Installed) -> None:
    done = installed("duemq-recurring").run("python", "-I", "-W", "error", "-c", TWIN_REPEATS)
    assert (done.stdout, done.stderr) == ("24\n", "")
    done = installed("duemq").run("python", "-I", "-W", "error", "-c", TWIN_REPEATS)
    assert "pip install 'duemq[testing]'" in done.stdout
    assert (done.stdout.splitlines()[1:], done.stderr) == (["0"], "")


def test_the_rules_of_schedules_work_without_the_services(installed: Installed) -> None:
    done = installed("duemq-recurring").run("python", "-I", "-W", "error", "-c", RULES_WORK)
    assert (done.stdout, done.stderr) == (f"{7 * 3_600_000}\n", "")


def test_the_command_line_helps(installed: Installed) -> None:
    done = installed("duemq-cli").run("duemq", "--help")
    assert done.returncode == 0, done.stderr
    assert {"send", "consume", "up", "bench", "demo", "trace"} <= set(done.stdout.split())


@pytest.mark.parametrize(
    ("command", "distribution"),
    [
        ("up", "duemq-server"),
        ("bench", "duemq-server"),
        ("demo", "duemq-server"),
        ("trace", "duemq-analytics"),
    ],
)
def test_the_command_line_says_what_is_missing(
    command: str, distribution: str, installed: Installed
) -> None:
    done = installed("duemq-cli").run("duemq", command, "--data", "d")
    assert done.returncode == 1
    assert f"duemq {command} needs {distribution}: pip install {distribution}" in done.stderr


@pytest.mark.parametrize("command", ["duemq-nameserver", "duemq-broker", "duemq-timer-service"])
def test_a_service_starts_and_stops(command: str, installed: Installed, tmp_path: Path) -> None:
    environment = installed("duemq-server")
    helped = environment.run(command, "--help")
    assert (helped.returncode, helped.stderr) == (0, "")
    assert helped.stdout.startswith(f"usage: {command} ")
    flags = ["--listen", "127.0.0.1:0"]
    if command != "duemq-nameserver":
        # Nobody listens there: a service starts and waits for its nameserver.
        data = str(tmp_path / "data")
        flags += ["--nameservers", "127.0.0.1:1", "--data-dir", data, "--name", "alone"]
    with (
        (tmp_path / "log").open("w") as log,
        subprocess.Popen(
            [environment.command(command), *flags], stdout=subprocess.PIPE, stderr=log
        ) as service,
    ):
        assert service.stdout is not None
        said = service.stdout.readline()  # where it listens
        service.terminate()
    assert (service.returncode, bool(said)) == (0, True), (tmp_path / "log").read_text()


def test_a_cluster_delivers_without_spark(installed: Installed, tmp_path: Path) -> None:
    environment = installed("duemq-server", "duemq-cli")
    with cluster(environment, tmp_path) as nameserver:
        at = ("duemq", "--nameserver", nameserver)
        sent = environment.run(*at, "send", "t", "later", "--delay", "1s")
        assert sent.returncode == 0, sent.stderr
        where = ("--group", "g", "--from", "earliest", "--count", "1", "--idle-timeout", "60")
        got = environment.run(*at, "consume", "t", *where, "--json")
        assert json.loads(got.stdout)["body"] == "later", got.stderr
        report = environment.run(*at, "trace", "report")
        assert report.returncode == 1
        assert "duemq trace needs duemq-analytics: pip install duemq-analytics" in report.stderr


@contextmanager
def cluster(environment: Environment, folder: Path):
    """`duemq up`; yields the nameserver's address."""
    command = [environment.command("duemq"), "up", "--data", str(folder), "--port", "0"]
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with subprocess.Popen(
        [*command, "--brokers", "1", "--json"], stdout=subprocess.PIPE, env=inherited, text=True
    ) as up:
        assert up.stdout is not None
        try:
            ready = next(json.loads(line) for line in up.stdout if '"ready"' in line)
            yield ready["nameserver"]
        finally:
            up.terminate()
            up.stdout.read()
    assert up.returncode == 0


def test_analytics_bring_their_command(installed: Installed) -> None:
    environment = installed("duemq-analytics", "duemq-cli")
    helped = environment.run("duemq", "trace", "report", "--help")
    assert helped.returncode == 0, helped.stderr
    assert "--output" in helped.stdout


def test_analytics_know_their_sources_by_name(installed: Installed) -> None:
    program = "import pyspark_duemq, pyspark_duemq_spans, duemq_analytics.report"
    done = installed("duemq-analytics").run("python", "-I", "-c", program)
    assert (done.returncode, done.stderr) == (0, "")
