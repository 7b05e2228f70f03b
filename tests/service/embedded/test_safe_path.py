"""Children run what is installed, whatever lies in the folder that a command is started in."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from duemq_server.local_cluster import safe_path

BIN = Path(sys.executable).parent
PACKAGES = ("broker", "storage", "duemq_server", "duemq_analytics", "numpy")
MODULES = ("click", "duemq", "grpc", "json", "pyarrow", "uvloop")
# What is imported says so, and ends the process.
TRAP = "open(__file__ + '.imported', 'w').close()\nraise SystemExit('not what is installed')\n"
WHERE = "import importlib.util; print(importlib.util.find_spec({name!r}).origin)"


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A user's folder with names of ours and of what we need; nothing of it may be imported."""
    for name in PACKAGES:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(TRAP)
    for name in MODULES:
        (tmp_path / f"{name}.py").write_text(TRAP)
    yield tmp_path
    assert imported(tmp_path) == []


def imported(folder: Path) -> list[str]:
    return [str(each.relative_to(folder)) for each in folder.rglob("*.imported")]


def inherited(**more: str) -> dict[str, str]:
    ours = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONSAFEPATH")}
    return ours | more


def origin(name: str, folder: Path, environment: dict[str, str]) -> str:
    """Which file a child in `folder` would import."""
    done = subprocess.run(
        [sys.executable, "-c", WHERE.format(name=name)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    return done.stdout.strip()


def run(
    folder: Path, *command: str, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=folder,
        env=environment or inherited(),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_a_trap_works(tmp_path: Path, folder: Path) -> None:
    """What the other tests rule out happens where nobody takes care."""
    done = run(folder, sys.executable, "-m", "duemq_server.broker", "--help")
    assert (done.returncode, done.stderr) == (1, "not what is installed\n")
    (caught,) = imported(folder)
    (folder / caught).unlink()


@pytest.mark.parametrize("named", [None, ".", "{folder}", ":{folder}:"])
def test_a_child_imports_what_is_installed(folder: Path, named: str | None) -> None:
    environment = inherited()
    if named is not None:
        environment["PYTHONPATH"] = named.format(folder=folder)
    # Without care it would import the user's.
    assert str(folder) in origin("grpc", folder, environment)
    safe = safe_path.environment(environment)
    for name in ("duemq_server", "numpy", "duemq", "grpc", "json"):
        assert not origin(name, folder, safe).startswith(str(folder)), name


def test_what_pythonpath_names_is_still_found(folder: Path) -> None:
    (folder / "only_there.py").touch()
    safe = safe_path.environment({**os.environ, "PYTHONPATH": str(folder)})
    assert origin("only_there", Path("/"), safe) == str(folder / "only_there.py")
    # A child's child has the same.
    assert "PYTHONPATH" not in safe_path.environment({})


def test_a_whole_cluster_and_a_benchmarks_members_run_in_such_a_folder(folder: Path) -> None:
    with cluster(folder) as nameserver:
        at = (str(BIN / "duemq"), "--nameserver", nameserver)
        done = run(folder, *at, "bench", "group", "--count", "300", "--json")
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["figures"]["lost"] == 0


@contextmanager
def cluster(folder: Path) -> Iterator[str]:
    """`duemq up`; yields the nameserver's address."""
    command = [str(BIN / "duemq"), "up", "--data", "data", "--port", "0", "--brokers", "1"]
    with subprocess.Popen(
        [*command, "--json"], cwd=folder, env=inherited(), stdout=subprocess.PIPE, text=True
    ) as up:
        assert up.stdout is not None
        try:
            events = map(json.loads, up.stdout)
            last = next(each for each in events if each.get("event") not in ("started", "moved"))
            assert last["event"] == "ready", last
            yield last["nameserver"]
        finally:
            up.terminate()
            up.stdout.read()
    assert up.returncode == 0


def test_the_job_of_a_report_runs_in_such_a_folder(folder: Path) -> None:
    # Where there is no Java the job says so, after its imports.
    (folder / "bin").mkdir()
    environment = inherited(PATH=str(folder / "bin"))
    environment.pop("JAVA_HOME", None)
    done = run(folder, str(BIN / "duemq"), "trace", "report", environment=environment)
    assert done.returncode == 2
    assert "Spark needs Java" in done.stderr


def test_the_module_duemq_cli_does_not_import_from_the_current_folder(folder: Path) -> None:
    done = run(folder, sys.executable, "-m", "duemq_cli", "--version")
    assert (done.returncode, done.stderr) == (0, "")
