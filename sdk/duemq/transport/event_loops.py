"""Event loops for threads of our own: uvloop's where the extra `duemq[uvloop]` is installed.

A frame takes half a dozen turns of a broker's event loop.  Loops that the application runs are its
own choice.
"""

import asyncio

try:
    import uvloop
except ImportError:
    uvloop = None  # type: ignore[assignment]


def new_event_loop() -> asyncio.AbstractEventLoop:
    """A new one.  Its clock may count whole milliseconds, and a timer come one too early."""
    return uvloop.new_event_loop() if uvloop else asyncio.new_event_loop()
