"""Settings of a process, and event loops, that moving many messages profits from.  Servers' too."""

import asyncio
import ctypes
import gc
import os
import sys

try:
    import uvloop
except ImportError:
    uvloop = None  # type: ignore[assignment]

# glibc takes blocks of 128 KiB and more from the kernel and returns them at once, so that each page
# of a frame is faulted in anew: moving frames then costs 2 to 30 times as much CPU.  Blocks up to
# 32 MiB (the most that every glibc takes) now come from the heap, and 64 MiB of free heap stay.
_MMAP_THRESHOLD, _TRIM_THRESHOLD, _TOP_PAD = -3, -1, -2
_MALLOPT = ((_MMAP_THRESHOLD, 32 << 20), (_TRIM_THRESHOLD, 64 << 20), (_TOP_PAD, 1 << 20))
# A thread that is done waiting must get the interpreter soon.  Default: 5 ms.
SWITCH_INTERVAL_S = 0.0005
# Default: 700, 10, 10.  Receipts and received messages are made by the thousand and die soon;
# looking at them so often takes a quarter of a consumer's time.
COLLECTION_THRESHOLDS = (10_000, 20, 50)
# gRPC's event engine passes what it reads on to one more thread: a quarter more waits, an eighth
# more latency of small frames.  gRPC looks at this with its first channel or server.
GRPC_EXPERIMENTS = "-event_engine_client,-event_engine_listener"


def tune_process() -> None:
    """Makes this process spend a third less CPU time on sending and receiving many messages.

    It is the whole process's, so nothing calls it unasked: up to 64 MiB more stay resident (glibc),
    threads take turns every 0.5 ms, the garbage collector ignores what exists now and looks at new
    objects every 10,000 instead of 700; gRPC uses its older engine, unless GRPC_EXPERIMENTS is set.
    Call it once, when everything is imported and before the first client.
    """
    os.environ.setdefault("GRPC_EXPERIMENTS", GRPC_EXPERIMENTS)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    gc.set_threshold(*COLLECTION_THRESHOLDS)
    gc.collect()
    gc.freeze()
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # not glibc: slower, not wrong
        return
    for parameter, value in _MALLOPT:
        mallopt(parameter, value)


def new_event_loop() -> asyncio.AbstractEventLoop:
    """For a thread of our own: uvloop's where the extra `duemq[uvloop]` is installed.

    A frame takes half a dozen turns of a broker's event loop.  Loops that the application runs are
    its own choice.  Its clock may count whole milliseconds, and a timer come one too early.
    """
    return uvloop.new_event_loop() if uvloop else asyncio.new_event_loop()
