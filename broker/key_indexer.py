"""Has the key index built in the background: one run at a time, in a thread of its own."""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from duemq_server.broker.edge.metrics import Meters
from duemq_server.broker.store.checkpoint_state import CheckpointState
from duemq_server.broker.store.keys.key_builder import KeyBuilder
from duemq_server.broker.store.queues import Queue
from duemq_server.broker.store.store import Store
from duemq_server.storage.errors import DiskFull, StorageError

log = logging.getLogger(__name__)

# After a run, times its duration: at most a third of a processor goes into a backlog.
REST = 2

T = TypeVar("T")


class KeyIndexer:
    """Builds the runs of what the last checkpoint holds."""

    def __init__(self, store: Store, builder: KeyBuilder, meters: Meters) -> None:
        self._store = store
        self._builder = builder
        self._meters = meters
        self._thread = ThreadPoolExecutor(1, "key-index")
        self._wake = asyncio.Event()
        self._queues: Sequence[Queue] = ()
        self._ends: Mapping[str, Sequence[int]] = {}

    def saved(self, queues: list[Queue], state: CheckpointState) -> None:
        """A checkpoint of these queues is on the disk."""
        self._queues, self._ends = queues, state.queues
        self._wake.set()

    def close(self) -> None:
        """Waits for the run that is being built."""
        self._thread.shutdown(cancel_futures=True)

    async def run(self) -> None:
        """For ever."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            if await self._build_some():
                self._wake.set()

    async def _build_some(self) -> bool:
        """Whether there is more to do at once."""
        queues, ends = self._queues, self._ends
        plan = await self._in_thread(partial(self._builder.plan, queues, ends))
        built = 0
        for span in plan.spans:
            self._note(plan.built + built, plan.missing - built)
            if not self._store.writable:
                return False
            began = time.monotonic()
            try:
                built += await self._in_thread(partial(self._builder.build, span))
            except DiskFull as error:
                log.error("key index: %s", error)
                return False
            except (StorageError, OSError, IndexError) as error:
                log.error("no key run of %s, offset %d: %s", span.queue.key, span.base, error)
            await asyncio.sleep(REST * (time.monotonic() - began))
        self._note(plan.built + built, plan.missing - built)
        return bool(built) and plan.missing > len(plan.spans)

    def _note(self, built: int, missing: int) -> None:
        self._meters.key_runs.set(built)
        self._meters.key_runs_missing.set(missing)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)
