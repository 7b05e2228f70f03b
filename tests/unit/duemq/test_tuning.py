"""In a process of its own: what is tuned is the process's."""

import subprocess
import sys

PROGRAM = """
import gc, sys
import duemq
before = gc.get_threshold(), sys.getswitchinterval()
duemq.Producer  # loads gRPC, which tunes nothing
assert (gc.get_threshold(), sys.getswitchinterval()) == before
duemq.tune_process()
assert gc.get_threshold()[0] == 10_000 and gc.isenabled()
assert gc.get_freeze_count() > 1_000
assert abs(sys.getswitchinterval() - 0.0005) < 1e-6
blocks = [bytes(1 << 20) for _ in range(8)]
"""


def test_only_who_asks_gets_a_tuned_process():
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
