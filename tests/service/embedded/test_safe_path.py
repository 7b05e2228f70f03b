"""Children run what is installed, whatever lies in the folder that the cluster is started in."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from duemq_server.local_cluster import safe_path

SERVICES = ("nameserver", "broker", "timer_service", "storage")
WHERE = "import importlib.util; print(importlib.util.find_spec({name!r}).origin)"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A user's folder, with packages of the services' names and a module of ours."""
    for name in SERVICES:
        package = tmp_path / name
        package.mkdir()
        (package / "__init__.py").write_text("raise SystemExit('not the one that is installed')\n")
    for name in ("duemq", "grpc", "json"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('not the one that is installed')\n")
    return tmp_path


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


@pytest.mark.parametrize("named", [None, ".", "{folder}", ":{folder}:"])
def test_a_child_imports_what_is_installed(folder: Path, named: str | None) -> None:
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    if named is not None:
        inherited["PYTHONPATH"] = named.format(folder=folder)
    # Without care it would import the user's.
    assert str(folder) in origin("broker", folder, inherited | {"PYTHONSAFEPATH": ""})
    safe = safe_path.environment(inherited)
    for name in (*SERVICES, "duemq", "json"):
        assert not origin(name, folder, safe).startswith(str(folder)), name


def test_what_pythonpath_names_is_still_found(folder: Path) -> None:
    (folder / "only_there.py").touch()
    safe = safe_path.environment({**os.environ, "PYTHONPATH": str(folder)})
    assert origin("only_there", Path("/"), safe) == str(folder / "only_there.py")
    # A child's child has the same.
    assert "PYTHONPATH" not in safe_path.environment({})


def test_a_whole_cluster_runs_in_such_a_folder(folder: Path) -> None:
    command = [str(Path(sys.executable).parent / "duemq"), "up", "--data", "data", "--port", "0"]
    environment = {**os.environ, "PYTHONPATH": ""}
    with subprocess.Popen(
        [*command, "--brokers", "1", "--json"],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    ) as up:
        assert up.stdout is not None
        try:
            events = []
            for line in up.stdout:
                events.append(json.loads(line).get("event"))
                if events[-1] not in ("started", "moved"):
                    break
        finally:
            up.terminate()
            up.stdout.read()
    assert events[-1] == "ready", events
    assert up.returncode == 0


def test_the_module_duemq_cli_does_not_import_from_the_current_folder(tmp_path: Path) -> None:
    (tmp_path / "click.py").write_text("raise SystemExit('not the one that is installed')\n")
    done = subprocess.run(
        [sys.executable, "-m", "duemq_cli", "--version"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")
