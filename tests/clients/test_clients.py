"""Programs that know nothing of DueMQ but protos/ (see README.md; `make clients` builds them)."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from duemq.embedded import EmbeddedCluster

HERE = Path(__file__).parent
CLIENTS = {
    "go": (HERE / "go/bin/client", ["{built}"]),
    "node": (HERE / "node/node_modules", ["node", str(HERE / "node/main.js")]),
    "java": (
        HERE / "java/target/client.jar",
        ["java", "-cp", "{built}:" + str(HERE / "java/target/dependency/*"), "clienttest.Client"],
    ),
}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with EmbeddedCluster(tmp_path_factory.mktemp("cluster"), brokers=1) as running:
        yield running


@pytest.mark.toolchain
@pytest.mark.cluster
@pytest.mark.parametrize("language", CLIENTS)
def test_a_generated_client_sends_delays_cancels_and_pulls(language, cluster):
    built, command = CLIENTS[language]
    if not built.exists():
        pytest.skip(f"the {language} client is not built: make clients")
    command = [part.format(built=built) for part in command]
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not on the PATH")
    done = subprocess.run(
        [*command, cluster.nameserver, f"clients-{language}"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    refused = "NotFound" if language == "go" else "NOT_FOUND"
    assert json.loads(done.stdout) == {"ok": True, "records": 4, "refused": refused}
