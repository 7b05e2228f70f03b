"""Settings of all tests."""

import gc
import threading
from collections.abc import Generator

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadFileScheduling

from duemq.transport import loop_thread

# No deadline: a slow machine is not a bug.  The same examples each time: what CI says is about the
# change.  `make fuzz` takes others, and more.
settings.register_profile(
    "ci", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile(
    "campaign",
    settings.get_profile("ci"),
    derandomize=False,
    max_examples=2_000,
    print_blob=True,
)
settings.load_profile("ci")


# How long a client that is being closed may take.
CLOSE_S = 20.0


class ByFixtures(LoadFileScheduling):
    """Gives a file to one worker, as its tests share a cluster.

    A folder whose files share what is dear, a Spark session or built wheels, goes to one, too.
    """

    def _split_scope(self, nodeid: str) -> str:
        for folder in ("tests/spark", "tests/packaging"):
            if nodeid.startswith(f"{folder}/"):
                return folder
        return super()._split_scope(nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> ByFixtures:
    """In the order of collection: slow files come early, `tests/unit` fills up the end."""
    config.option.loadscopereorder = False
    return ByFixtures(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes one worker longest begins first."""
    items.sort(key=lambda item: not item.nodeid.startswith("tests/spark/"))


def pytest_collection_finish() -> None:
    """What was imported stays: spares the garbage collector a walk over it in every test."""
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(
    item: pytest.Item, nextitem: pytest.Item | None
) -> Generator[None, None, None]:
    """A client that a file's tests left open would disturb those behind it, far from its cause."""
    yield
    if nextitem is None or nextitem.path != item.path:
        for thread in threading.enumerate():
            if thread.name == loop_thread.NAME:
                thread.join(CLOSE_S)
                assert not thread.is_alive(), f"{item.path.name} left a blocking client open"
