"""The programs that are made of protos/ alone, and how to run them (`make clients` builds them)."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
JAVA = ["java", "-cp", "{built}:" + str(HERE / "java/target/dependency/*")]
CLIENTS = {
    "go": (HERE / "go/bin/client", ["{built}"]),
    "node": (HERE / "node/node_modules", ["node", str(HERE / "node/main.js")]),
    "java": (HERE / "java/target/client.jar", [*JAVA, "clienttest.Client"]),
    "rust": (HERE / "rust/target/debug/client", ["{built}"]),
}
# The Python of `make proto`: it has gRPC and no DueMQ.
PYTHON = ROOT / ".venv-proto/bin/python"
CONSUMERS = {
    "go": (HERE / "go/bin/consumer", ["{built}"]),
    "node": (HERE / "node/node_modules", ["node", str(HERE / "node/consumer.js")]),
    "java": (HERE / "java/target/client.jar", [*JAVA, "clienttest.Consumer"]),
    "rust": (HERE / "rust/target/debug/consumer", ["{built}"]),
    "python": (PYTHON, ["{built}", str(HERE / "python/consumer.py")]),
}
TIMER_KEYS = {
    "node": (HERE / "node/node_modules", ["node", str(HERE / "node/timer_keys.js")]),
    "python": (PYTHON, ["{built}", str(HERE / "python/timer_keys.py")]),
}
RUN_S_MAX = 60


def command_of(language, programs):
    built, command = programs[language]
    if not built.exists():
        pytest.skip(f"the {language} client is not built: make clients")
    command = [part.format(built=built) for part in command]
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not on the PATH")
    return command


def run(command, *arguments, **environment):
    return subprocess.run(
        [*command, *arguments],
        capture_output=True,
        text=True,
        timeout=RUN_S_MAX,
        check=False,
        env=os.environ | environment,
    )
