"""Appends to a log for ever and prints the number of each entry once it is acknowledged."""

import sys
import time

from duemq_server.storage.disk import RealDisk
from duemq_server.storage.errors import LogFull
from duemq_server.storage.log import SegmentedLog
from duemq_server.storage.writer import LogWriter


def main(directory: str, sync: str) -> None:
    log = SegmentedLog.open(directory, RealDisk(), segment_bytes=200_000)
    number = sum(1 for _ in log.recover())
    ends: list[int] = []
    first = acknowledged = number

    def on_durable(position: int) -> None:
        nonlocal acknowledged
        while acknowledged - first < len(ends) and ends[acknowledged - first] <= position:
            acknowledged += 1
        print(acknowledged, flush=True)

    interval = None if sync == "sync" else 0.01
    LogWriter(log, on_durable, lambda error: None, sync_interval_s=interval).start()
    while True:
        try:
            ends.append(log.append(1, [b"%d " % number * (number % 300 + 1)])[1])
            number += 1
        except LogFull:
            time.sleep(0.001)


if __name__ == "__main__":
    main(*sys.argv[1:])
