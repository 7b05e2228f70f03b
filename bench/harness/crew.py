"""The members of a benchmark's group: processes, as in real life, that join and leave when told."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Self

from duemq.errors import Internal, Timeout
from duemq_server.bench.harness.counts import Tally
from duemq_server.bench.harness.traffic import STALL_S
from duemq_server.local_cluster import safe_path

POLL_S = 0.002
END_S = 30.0


class CrewMember:
    """One process and its tally."""

    def __init__(self, command: list[str], tally: Tally) -> None:
        self.tally = tally
        self._process = subprocess.Popen(
            command,
            env=safe_path.environment(os.environ),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def join(self) -> None:
        """Tells it to join; returns at once."""
        assert self._process.stdin is not None
        self._process.stdin.write("join\n")
        self._process.stdin.flush()

    def until(self, said: str) -> None:
        """Waits for "ready" or "joined".  Raises Internal if the member ended instead."""
        assert self._process.stdout is not None
        if self._process.stdout.readline() != f"{said}\n":
            raise Internal("a member of the benchmark's group ended; its error is above")

    def leave(self) -> None:
        """Tells it to leave; returns at once."""
        assert self._process.stdin is not None
        self._process.stdin.close()

    def kill(self) -> None:
        """kill -9."""
        self._process.kill()
        self._process.wait()

    def end(self) -> None:
        """Leaves, or is ended."""
        with contextlib.suppress(OSError):
            self.leave()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.kill()
        assert self._process.stdout is not None
        self._process.stdout.close()


class Crew:
    """All members that a benchmark will need, up and not joined; a context manager."""

    def __init__(
        self,
        nameserver: str,
        topic: str,
        *,
        members: int,
        count: int,
        session_timeout_s: float,
        timed: bool,
    ) -> None:
        """`count`: of messages that are to come.  `timed`: note when and from where, too."""
        self._command = [
            sys.executable,
            "-m",
            "duemq_server.bench.harness.member",
            nameserver,
            topic,
        ]
        self._options = [str(count), str(session_timeout_s), "note" if timed else "count"]
        self._wanted = members
        self._count = count
        self._stack = contextlib.ExitStack()
        self.members: list[CrewMember] = []

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="duemq-crew-")))
            for number in range(self._wanted):
                file = scratch / f"{number}"
                tally = stack.enter_context(Tally(file, self._count))
                member = CrewMember([*self._command, str(file), *self._options], tally)
                stack.callback(member.end)
                self.members.append(member)
            for member in self.members:
                member.until("ready")
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()

    def join(self, members: Iterable[CrewMember]) -> None:
        """Has them join, and waits for it."""
        chosen = list(members)
        for member in chosen:
            member.join()
        for member in chosen:
            member.until("joined")

    def pids(self, count: int) -> dict[str, int]:
        """Process ids of the first `count` members, by name."""
        return {f"member-{n}": member.pid for n, member in enumerate(self.members[:count])}

    @property
    def total(self) -> int:
        """How many messages came to all."""
        return sum(member.tally.total for member in self.members)

    def wait(self, count: int) -> float:
        """Until `count` came; answers when.  Raises Timeout when they stop coming."""
        before, since = self.total, time.perf_counter()
        while before < count:
            time.sleep(POLL_S)
            total, now = self.total, time.perf_counter()
            if total > before:
                before, since = total, now
            elif now - since > STALL_S:
                missing = count - total
                raise Timeout(f"{missing:,} messages did not come; none came for {STALL_S:g} s")
        return since

    def wait_for_each(self, count: int) -> None:
        """Until each of the first `count` came, some twice.  Raises Timeout as `wait` does."""
        total = self.total  # first: what comes while they are looked through is not waited for
        while self.figures(count)["lost"]:
            self.wait(total + 1)
            total = self.total

    def figures(self, count: int) -> dict[str, int]:
        """What of the first `count` was lost or came twice."""
        columns = zip(*(member.tally.seen[:count] for member in self.members), strict=True)
        counts = [sum(column) for column in columns]
        return {
            "lost": counts.count(0),
            "twice": sum(count - 1 for count in counts if count > 1),
        }
