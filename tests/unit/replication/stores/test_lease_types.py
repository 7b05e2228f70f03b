"""What the API server says is read by several threads: in a process of its own, which may crash."""

import subprocess
import sys

THREADS = """
import gc, sys, threading
from duemq_server.replication.stores import lease_api

sys.setswitchinterval(1e-6)
gc.set_threshold(5)
together = threading.Barrier(4)

def read():
    together.wait()
    lease_api.Status.from_dict({"code": 404, "message": "none", "details": {"name": "lines"}})
    lease_api.Lease.from_dict({"metadata": {"name": "lines"}, "spec": {"holderIdentity": "a"}})

threads = [threading.Thread(target=read) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""
TIMES = 6  # of the first reads of several threads, each second or third ended the process


def test_threads_that_read_the_first_answers_at_once_do_not_crash() -> None:
    for _ in range(TIMES):
        subprocess.run([sys.executable, "-c", THREADS], check=True, timeout=60)
