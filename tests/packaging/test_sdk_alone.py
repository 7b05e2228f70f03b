"""The SDK's wheel, alone with its four dependencies in a fresh environment, imports and sends."""

import asyncio
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from importlib.metadata import distribution
from pathlib import Path

import pytest

from tests.service.fake_cluster import FakeCluster

SDK = Path(__file__).resolve().parents[2] / "sdk"
DEPENDENCIES = {"grpcio", "opentelemetry-api", "protobuf", "tenacity"}
NOT_NEEDED = [
    "click",
    "grpc_health",
    "lark",
    "numpy",
    "opentelemetry.sdk",
    "prometheus_client",
    "rich",
]
PROGRAM = """
import importlib.util, sys
import duemq
for name in {not_needed!r}:
    try:
        found = importlib.util.find_spec(name)
    except ModuleNotFoundError:
        found = None
    assert found is None, name
assert duemq.__file__.startswith(sys.prefix), duemq.__file__
for name in duemq.__all__:
    getattr(duemq, name)
with duemq.Producer({nameserver!r}) as producer:
    print(producer.send("t", b"alone").offset, producer.send("t", b"late", delay="5s").handle)
"""


def names_of(requirements):
    """Names of requirements that need no extra."""
    return {
        re.match(r"[A-Za-z0-9_.-]+", requirement)[0]
        for requirement in requirements
        if "extra ==" not in requirement
    }


def closure(names):
    found, waiting = set(), set(names)
    while waiting:
        name = waiting.pop().lower()
        if name not in found:
            found.add(name)
            waiting |= names_of(distribution(name).requires or [])
    return found


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from a copy, so that the checkout stays clean."""
    folder = tmp_path_factory.mktemp("wheel")
    ignored = shutil.ignore_patterns("build", "*.egg-info", "__pycache__")
    source = shutil.copytree(SDK, folder / "sdk", ignore=ignored)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet"]
    offline = ["--no-index", "--no-deps", "--no-build-isolation"]
    subprocess.run(
        [*command, *offline, "--wheel-dir", str(folder), str(source)], check=True, timeout=110
    )
    (built,) = folder.glob("duemq-*.whl")
    return built


def test_the_wheel_holds_the_sdk_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        tops = {name.split("/")[0] for name in archive.namelist()}
        (metadata,) = [name for name in archive.namelist() if name.endswith("/METADATA")]
        lines = archive.read(metadata).decode().splitlines()
        assert "duemq/py.typed" in archive.namelist()
    assert {top for top in tops if not top.endswith(".dist-info")} == {"duemq"}
    requirements = [
        line.removeprefix("Requires-Dist: ") for line in lines if "Requires-Dist" in line
    ]
    assert names_of(requirements) == DEPENDENCIES


async def test_a_fresh_environment_sends(wheel, tmp_path):
    venv.create(tmp_path / "venv", with_pip=False, symlinks=True)
    (site,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    for name in closure(DEPENDENCIES):
        link_distribution(distribution(name), site)
    cluster = FakeCluster()
    await cluster.start("a")
    cluster.topic("t")
    program = PROGRAM.format(not_needed=NOT_NEEDED, nameserver=cluster.nameserver)
    process = await asyncio.create_subprocess_exec(
        str(tmp_path / "venv" / "bin" / "python"),
        *("-I", "-W", "error", "-c", program),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        out, err = await asyncio.wait_for(process.communicate(), 60)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        await cluster.stop()
    assert process.returncode == 0, err.decode()
    assert out.decode().startswith("0 dmq1")


def link_distribution(dist, site):
    """What an install would put there, file by file: namespaces are shared with other packages."""
    for file in dist.files or []:
        if file.parts[0] != ".." and "__pycache__" not in file.parts:
            target = site / file
            target.parent.mkdir(parents=True, exist_ok=True)
            if not target.exists():
                target.symlink_to(Path(dist.locate_file(file)).resolve())
