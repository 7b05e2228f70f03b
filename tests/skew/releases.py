"""Another release of this repository, to run beside this one.

It is checked out of the repository's history, and runs with the packages that are installed here:
only with those that it asks for itself, each in the version that it pins.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import metadata
from io import BytesIO
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("sdk", "recurring", "server")
PINS = "requirements/server.txt"
PIN = re.compile(r"^([a-z0-9-]+)==(\S+)", re.MULTILINE)


class NotHere(Exception):
    """The release cannot be run here; the text says why, and what to do."""


@dataclass(frozen=True)
class Release:
    """A checkout."""

    name: str
    root: Path

    def python(self, *arguments: str) -> list[str]:
        """The command line of a process of this release; it can import our `tests`, too."""
        path = os.pathsep.join([*(str(self.root / each) for each in PACKAGES), str(ROOT)])
        return ["env", f"PYTHONPATH={path}", "PYTHONSAFEPATH=1", sys.executable, *arguments]


HERE = Release("new", ROOT)


def default() -> str:
    """The revision of the last release."""
    return (Path(__file__).parent / "last-release").read_text(encoding="utf-8").strip()


def check_out(revision: str, directory: Path) -> Release:
    """Raises NotHere if the history has no such revision, or other packages are installed."""
    if _git("rev-parse", "--verify", "--quiet", f"{revision}^{{commit}}").returncode:
        raise NotHere(
            f"this repository has no revision {revision}, of which an upgrade is tried."
            " A shallow clone lacks what is older: `git fetch --unshallow` brings it;"
            " FROM=<revision> names another one"
        )
    folders = set(_list(revision)) & {*PACKAGES, "requirements"}
    linked = _list(f"{revision}:server/duemq_server")  # the packages of the server
    folders.update(name for name in linked if not name.endswith(".py"))
    archive = _git("archive", revision, *sorted(folders))
    if archive.returncode:
        raise NotHere(f"{revision} cannot be checked out: {archive.stderr.decode().strip()}")
    with tarfile.open(fileobj=BytesIO(archive.stdout)) as files:
        files.extractall(directory, filter="tar")
    others = differing((directory / PINS).read_text(encoding="utf-8"))
    if others:
        raise NotHere(f"{revision} needs other packages than are installed: {', '.join(others)}")
    release = Release("old", directory)
    command = release.python("-c", "import duemq_server.broker as found; print(found.__file__)")
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    if not found.startswith(str(directory)):
        raise NotHere(f"{revision} is not what runs, but {found.strip()}")
    return release


def differing(requirements: str) -> list[str]:
    """What is pinned there and not installed here in the same version."""
    installed = {each.name.lower().replace("_", "-"): each.version for each in _installed()}
    pins = dict(PIN.findall(requirements))
    return [
        f"{name} {version} (here: {installed.get(name, 'none')})"
        for name, version in pins.items()
        if installed.get(name) != version
    ]


def _installed() -> Sequence[metadata.Distribution]:
    return list(metadata.distributions())


def _list(tree: str) -> list[str]:
    return _git("ls-tree", "--name-only", tree).stdout.decode().splitlines()


def _git(*arguments: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, check=False)
