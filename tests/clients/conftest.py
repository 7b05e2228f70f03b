import subprocess

import pytest

from duemq_server.local_cluster import EmbeddedCluster
from tests.clients.programs import PYTHON, ROOT, RUN_S_MAX


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with EmbeddedCluster(tmp_path_factory.mktemp("cluster"), brokers=2) as running:
        yield running


@pytest.fixture(scope="session")
def stubs(tmp_path_factory):
    """Python's, made here and now from protos/."""
    directory = tmp_path_factory.mktemp("stubs")
    if PYTHON.exists():
        protos = sorted((ROOT / "protos/duemq/v1").glob("*.proto"))
        command = [PYTHON, "-m", "grpc_tools.protoc", f"-I{ROOT / 'protos'}"]
        command += [f"--python_out={directory}", f"--grpc_python_out={directory}", *protos]
        subprocess.run(command, check=True, timeout=RUN_S_MAX)
    return directory
