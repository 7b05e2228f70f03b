"""Builds the distributions and installs them, as pip would without a network."""

import re
import shutil
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from email.message import Message
from email.parser import HeaderParser
from functools import cache
from importlib.metadata import distribution, packages_distributions
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
# Distribution → its folder and what it installs.
PROJECTS = {
    "duemq": ("sdk", {"duemq"}),
    "duemq-recurring": ("recurring", {"duemq_recurring"}),
    "duemq-cli": ("cli", {"duemq_cli"}),
    "duemq-server": ("server", {"duemq_server"}),
    "duemq-analytics": (
        "trace_analytics",
        {"duemq_analytics", "pyspark_duemq.py", "pyspark_duemq_spans.py"},
    ),
}
WAIT_S = 200
IGNORED = shutil.ignore_patterns("build", "*.egg-info", "__pycache__")
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet")


@dataclass(frozen=True)
class Wheel:
    """A built distribution."""

    name: str
    path: Path

    def files(self) -> set[str]:
        with zipfile.ZipFile(self.path) as archive:
            return set(archive.namelist())

    def read(self, name: str) -> str:
        """Of the file of that name in the .dist-info folder."""
        with zipfile.ZipFile(self.path) as archive:
            (path,) = (each for each in archive.namelist() if f".dist-info/{name}" in each)
            return archive.read(path).decode()

    def metadata(self) -> Message:
        return HeaderParser().parsestr(self.read("METADATA"))

    def requirements(self) -> list[str]:
        return self.metadata().get_all("Requires-Dist") or []


def build(name: str, folder: Path) -> Wheel:
    """From a copy, so that the checkout stays clean."""
    source = shutil.copytree(ROOT / PROJECTS[name][0], folder / "source", ignore=IGNORED)
    offline = ("--no-index", "--no-deps", "--no-build-isolation")
    command = (*PIP, "wheel", *offline, "--wheel-dir", str(folder), str(source))
    subprocess.run(command, check=True, timeout=WAIT_S)
    (path,) = folder.glob("*.whl")
    return Wheel(name, path)


def required(name: str, wheels: dict[str, Wheel]) -> set[str]:
    """Names of all distributions that are installed with `name`, itself among them."""
    found: set[tuple[str, str]] = set()
    waiting = {(name, "")}
    while waiting:
        each, extra = waiting.pop()
        if (each, extra) in found:
            continue
        found.add((each, extra))
        ours = each in wheels
        texts = wheels[each].requirements() if ours else distribution(each).requires or []
        for requirement in map(Requirement, texts):
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                needed = re.sub(r"[-_.]+", "-", requirement.name).lower()
                waiting |= {(needed, it) for it in (*requirement.extras, "")}
    return {each for each, _ in found}


@dataclass(frozen=True)
class Environment:
    """A virtual environment that holds some of our distributions, and what they require."""

    folder: Path

    @property
    def python(self) -> str:
        return self.command("python")

    def command(self, name: str) -> str:
        return str(self.folder / "bin" / name)

    def run(self, *command: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        """`command[0]` is one of the environment's."""
        return subprocess.run(
            [self.command(command[0]), *command[1:]],
            cwd=cwd or self.folder,
            env={"PATH": "/usr/bin:/bin", "HOME": str(self.folder)},
            capture_output=True,
            text=True,
            timeout=WAIT_S,
            check=False,
        )


def install(names: Iterable[str], wheels: dict[str, Wheel], folder: Path) -> Environment:
    """`names` and all that they require: our wheels by pip, the others by links."""
    venv.create(folder, with_pip=False, symlinks=True)
    (site,) = (folder / "lib").glob("python*/site-packages")
    needed = set().union(*(required(name, wheels) for name in names))
    environment = Environment(folder)
    ours = [str(wheels[name].path) for name in sorted(needed & set(wheels))]
    offline = ("--no-index", "--no-deps", "--no-compile")
    command = (*PIP, "--python", environment.python, "install", *offline, *ours)
    subprocess.run(command, check=True, timeout=WAIT_S)
    for name in needed - set(wheels):
        _link(name, site)
    return environment


def _link(name: str, site: Path) -> None:
    """What pip would put there.  Folders that several distributions share are linked by file."""
    dist = distribution(name)
    for file in dist.files or []:
        top = file.parts[0]
        whole = len(_sharing().get(top, ())) == 1 or top.endswith(".dist-info")
        linked = top if whole else str(file)
        source, target = Path(str(dist.locate_file(linked))), site / linked
        if top != ".." and source.exists() and not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to(source.resolve())


@cache
def _sharing() -> Mapping[str, list[str]]:
    """Folder or module → the distributions here that have files in it."""
    return packages_distributions()
