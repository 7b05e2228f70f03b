"""Server and command line, alone with what they require: a cluster runs, without Spark."""

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
# Of the extra `analytics`; hundreds of megabytes.
NOT_NEEDED = ("pyspark", "pyarrow", "matplotlib", "jinja2")
PACKAGES = ("storage", "nameserver", "broker", "timer_service", "trace_analytics")
WAIT_S = 100


def built(folder: Path, project: Path) -> Path:
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-index", "--no-deps"]
    before = set(folder.glob("*.whl"))
    subprocess.run(
        [*command, "--no-build-isolation", "--wheel-dir", str(folder), str(project)],
        check=True,
        timeout=WAIT_S,
    )
    (wheel,) = set(folder.glob("*.whl")) - before
    return wheel


def required(names: set[tuple[str, str]]) -> set[str]:
    """The distributions that are installed with (name, extra), by their metadata here."""
    found: set[tuple[str, str]] = set()
    waiting = set(names)
    while waiting:
        name, extra = waiting.pop()
        if (name, extra) in found:
            continue
        found.add((name, extra))
        for text in distribution(name).requires or []:
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                extras = requirement.extras or {""}
                waiting |= {(requirement.name, each) for each in (*extras, "")}
    return {name for name, _ in found}


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of an environment that holds the two wheels and what they require."""
    folder = tmp_path_factory.mktemp("server")
    ignored = shutil.ignore_patterns("build", "*.egg-info", "__pycache__")
    source = folder / "source"
    shutil.copytree(ROOT / "sdk", source / "sdk", ignore=ignored)
    for package in PACKAGES:
        shutil.copytree(ROOT / package, source / package, ignore=ignored)
    for file in ("pyproject.toml", "pyspark_duemq.py", "pyspark_duemq_spans.py"):
        shutil.copy(ROOT / file, source)
    wheels = [built(folder, source / "sdk"), built(folder, source)]
    venv.create(folder / "venv", with_pip=False, symlinks=True)
    (site,) = (folder / "venv" / "lib").glob("python*/site-packages")
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(site)
    for name in required({("duemq-server", "")}) - {"duemq", "duemq-server"}:
        install(name, site)
    return folder / "venv" / "bin" / "python"


def install(name: str, site: Path) -> None:
    """What pip would put there, by links."""
    dist = distribution(name)
    for file in dist.files or []:
        if file.parts[0] != ".." and "__pycache__" not in file.parts:
            target = site / file
            target.parent.mkdir(parents=True, exist_ok=True)
            if not target.exists():
                target.symlink_to(Path(str(dist.locate_file(file))).resolve())


def run(python: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(python), "-I", *arguments],
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )


@pytest.mark.parametrize("name", NOT_NEEDED)
def test_spark_and_what_it_needs_are_not_there(python: Path, name: str) -> None:
    assert importlib.util.find_spec(name) is not None  # here, so that the test can fail
    looked = run(python, "-c", f"import importlib.util; print(importlib.util.find_spec({name!r}))")
    assert looked.stdout.strip() == "None", looked.stderr


def test_a_cluster_runs_and_delivers(python: Path, tmp_path: Path) -> None:
    command = [str(python), "-I", "-m", "duemq_cli"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with subprocess.Popen(
        [*command, "up", "--data", str(tmp_path), "--port", "0", "--brokers", "1", "--json"],
        stdout=subprocess.PIPE,
        env=environment,
        text=True,
    ) as up:
        assert up.stdout is not None
        try:
            ready = next(json.loads(line) for line in up.stdout if '"ready"' in line)
            nameserver = ["--nameserver", ready["nameserver"]]
            sent = run(
                python, "-m", "duemq_cli", *nameserver, "send", "t", "later", "--delay", "1s"
            )
            assert sent.returncode == 0, sent.stderr
            got = run(
                python,
                *("-m", "duemq_cli", *nameserver, "consume", "t", "--group", "g"),
                *("--from", "earliest", "--count", "1", "--idle-timeout", "60", "--json"),
            )
            assert json.loads(got.stdout)["body"] == "later", got.stderr
            report = run(python, "-m", "duemq_cli", *nameserver, "trace", "report")
            assert report.returncode == 1
            assert "duemq-server[analytics]" in report.stderr
        finally:
            up.terminate()
            up.stdout.read()
    assert up.returncode == 0
