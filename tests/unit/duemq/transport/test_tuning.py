"""In a process of its own: what is tuned is the process's."""

import subprocess
import sys

import pytest

from duemq.transport.tuning import GRPC_EXPERIMENTS

PROGRAM = """
import gc, os, sys
import duemq
before = gc.get_threshold(), sys.getswitchinterval()
duemq.Producer  # loads gRPC, which tunes nothing
assert (gc.get_threshold(), sys.getswitchinterval()) == before
duemq.tune_process()
assert gc.get_threshold()[0] == 10_000 and gc.isenabled()
assert gc.get_freeze_count() > 1_000
assert abs(sys.getswitchinterval() - 0.0005) < 1e-6
assert os.environ["GRPC_EXPERIMENTS"] == sys.argv[1]
blocks = [bytes(1 << 20) for _ in range(8)]
"""


@pytest.mark.parametrize(("given", "expected"), [(None, GRPC_EXPERIMENTS), ("", ""), ("x", "x")])
def test_only_who_asks_gets_a_tuned_process(given: str | None, expected: str, monkeypatch) -> None:
    monkeypatch.delenv("GRPC_EXPERIMENTS", raising=False)
    if given is not None:
        monkeypatch.setenv("GRPC_EXPERIMENTS", given)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM, expected],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
