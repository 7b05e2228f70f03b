"""The commands of the services: from their first moment on they heed SIGTERM.

The first process of a container ignores it until it has a handler, and a service that must import
half a second first would be waited for until its grace period is over.
"""

import os
import signal


def nameserver() -> int:
    """`duemq-nameserver`.  Returns the exit status."""
    end_on_sigterm()
    from duemq_server.nameserver.__main__ import main

    return main()


def broker() -> int:
    """`duemq-broker`.  Returns the exit status."""
    end_on_sigterm()
    from duemq_server.broker.__main__ import main

    return main()


def timer_service() -> int:
    """`duemq-timer-service`.  Returns the exit status."""
    end_on_sigterm()
    from duemq_server.timer_service.__main__ import main

    return main()


def end_on_sigterm() -> None:
    """Until a service has its own handler: it has begun nothing that had to be ended."""
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
