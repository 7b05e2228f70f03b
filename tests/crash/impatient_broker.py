"""A broker that lets a timer service be given up as soon as it has been silent for a second."""

import runpy

from duemq_server.broker.records import timer_owners

timer_owners.ALIVE_MS = 1_000

if __name__ == "__main__":
    runpy.run_module("duemq_server.broker", run_name="__main__", alter_sys=True)
