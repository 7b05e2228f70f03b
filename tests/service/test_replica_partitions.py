"""Replicas whose links and whose store break in every way, at random and on purpose.

REPLICA_SEEDS (by default 1) random histories of REPLICA_SECONDS (by default 5) each, from
REPLICA_FIRST on; `make prove-replicas` takes more.  Judged at the end: what was acknowledged is in
every log, in order and once; no position was committed by two leaders; whoever answered reads had
no successor; and when all is healed, all are in sync.
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil

import pytest

from duemq_server.replication.running import process
from tests.service.replica_group import Group
from tests.service.replica_network import FAST, Network, network
from tests.service.running_cluster import until

SEEDS = int(os.environ.get("REPLICA_SEEDS", "1"))
FIRST = int(os.environ.get("REPLICA_FIRST", "1"))
SECONDS = float(os.environ.get("REPLICA_SECONDS", "5"))
ANSWER_S = 1.0  # then a client gives a write up: it may be done or not

pytestmark = pytest.mark.timeout(120 + SECONDS * 2)


class Judge:
    """What leaders did and clients were told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.acked: list[bytes] = []
        self.faults: list[str] = []
        self.terms: list[process.Leading] = []
        made = process.Leading

        def leading(*arguments, **named):
            term = made(*arguments, **named)
            self.terms.append(term)
            return term

        monkeypatch.setattr(process, "Leading", leading)

    async def write(self, group: Group) -> None:
        """One client, for ever: a line after the other, each once."""
        number = 0
        while True:
            terms = [each.term for each in group.members.values() if each.term is not None]
            self._look(group)
            if not terms or terms[0].quiet:
                await asyncio.sleep(0.01)
                continue
            line = b"%06d" % number + b"x" * 500
            number += 1
            try:
                async with asyncio.timeout(ANSWER_S):
                    await terms[0].write(line)
            except Exception:
                continue
            self.acked.append(line)

    def _look(self, group: Group) -> None:
        """Whoever answers reads is of the newest epoch that commits."""
        running = [
            each.replica.leading
            for each in group.members.values()
            if each.task is not None and each.replica is not None
        ]
        leading = [each for each in running if each is not None]
        newest = max((each.leader.epoch for each in leading if each.leader.prepared), default=0)
        for each in leading:
            if each.leader.prepared and each.serves() and each.leader.epoch < newest:
                self.faults.append(f"{each.leader.me} serves {each.leader.epoch}, not {newest}")

    def judge(self, histories: dict[str, list[bytes]]) -> list[str]:
        faults = [*self.faults]
        leaders: dict[int, object] = {}
        for term in self.terms:
            leader = term.leader
            if leaders.setdefault(leader.epoch, leader.me) != leader.me:
                faults.append(f"epoch {leader.epoch} has two leaders")
            faults += [
                f"epoch {leader.epoch} committed {leader.high_watermark}, where epoch"
                f" {later.leader.epoch} begins at {later.leader.start}"
                for later in self.terms
                if later.leader.epoch > leader.epoch and later.leader.prepared
                if leader.high_watermark > later.leader.start
            ]
        for name, lines in histories.items():
            place = {line: at for at, line in enumerate(lines)}
            if len(place) < len(lines):
                faults.append(f"{name} holds some lines twice")
            lost = [line[:6] for line in self.acked if line not in place]
            if lost:
                faults.append(f"{name} has lost {lost}")
            places = [place[line] for line in self.acked if line in place]
            if places != sorted(places):
                faults.append(f"{name} holds lines in another order")
        if len({tuple(each) for each in histories.values()}) > 1:
            faults.append("histories differ")
        return faults


class Hostile:
    """What happens to a group, from a seed."""

    def __init__(self, group: Group, net: Network, seed: int) -> None:
        self.group = group
        self.net = net
        self.random = random.Random(seed)
        self.did: list[str] = []

    async def disturb(self, seconds: float) -> None:
        loop = asyncio.get_running_loop()
        until_s = loop.time() + seconds
        what = [self.cut, self.swallow, self.isolate, self.lose_store, self.kill, self.stop]
        what += [self.hand_over, self.forget, self.empty, self.mend, self.mend]
        while loop.time() < until_s:
            await asyncio.sleep(self.random.uniform(0.05, 0.6))
            step = self.random.choice(what)
            self.did.append(step.__name__)
            await step()

    def _pair(self) -> tuple[str, str]:
        source, target = self.random.sample(sorted(self.group.members), 2)
        return source, target

    def _one(self) -> str:
        return self.random.choice(sorted(self.group.members))

    async def cut(self) -> None:
        self.net.link(*self._pair()).cut()

    async def swallow(self) -> None:
        there, back = self.random.choice([(True, True), (True, False), (False, True)])
        self.net.link(*self._pair()).swallow(there=there, back=back)

    async def isolate(self) -> None:
        there, back = self.random.choice([(True, True), (True, False), (False, True)])
        self.net.isolate(self._one(), there=there, back=back)
        if self.random.random() < 0.5:
            self.net.stores[self._one()].away = True

    async def lose_store(self) -> None:
        every = self.random.random() < 0.2
        names = sorted(self.group.members) if every else [self._one()]
        what = self.random.choice(["away", "away", "deaf", "late"])
        for name in names:
            store = self.net.stores[name]
            store.away, store.deaf = what == "away", what == "deaf"
            store.late_s = self.random.uniform(0.1, 2.0) if what == "late" else 0.0

    async def kill(self) -> None:
        member = self.group.members[self._one()]
        if member.task is not None:
            await member.kill()
        await asyncio.sleep(self.random.choice([0.0, 0.0, 1.0]))
        member.start()

    async def stop(self) -> None:
        """A clean one; it may have to wait for a successor that cannot be reached."""
        member = self.group.members[self._one()]
        await member.stop()
        member.start()

    async def hand_over(self) -> None:
        for member in self.group.members.values():
            if member.term is not None:
                try:
                    await member.replica.operators.hand_over("")
                except Exception as error:
                    self.did.append(type(error).__name__)
                return

    async def forget(self) -> None:
        """Retention: who is behind needs a snapshot."""
        for member in self.group.members.values():
            if member.term is not None:
                member.forget()

    async def empty(self) -> None:
        """A lost disk, where all others have what it had."""
        self.net.heal()
        async with asyncio.timeout(30):
            leader = await self.group.in_sync(len(self.group.members))
        others = [each for each in self.group.members.values() if each is not leader]
        member = self.random.choice(others)
        await member.kill()
        shutil.rmtree(member.directory)
        member.start()

    async def mend(self) -> None:
        self.net.heal()


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("seed", range(FIRST, FIRST + SEEDS))
async def test_whatever_breaks_nothing_acknowledged_is_lost(monkeypatch, tmp_path, seed, count):
    judge = Judge(monkeypatch)
    group = Group(tmp_path, count, **FAST)
    async with network(monkeypatch, group) as net:
        group.start()
        hostile = Hostile(group, net, seed)
        writer = asyncio.create_task(judge.write(group))
        try:
            await group.in_sync(count)
            await hostile.disturb(SECONDS)
            net.heal()
            await group.in_sync(count)
            acked = len(judge.acked)
            await until(lambda: len(judge.acked) > acked)  # it goes on
        except BaseException:
            print(hostile.did, group.states())
            raise
        finally:
            writer.cancel()
            await asyncio.gather(writer, return_exceptions=True)
        try:
            histories = await group.histories(judge.acked[-1])
            faults = judge.judge(histories)
            print(f"seed {seed}: {len(judge.acked)} lines, {len(judge.terms)} terms", hostile.did)
            assert faults == []
        finally:
            await group.stop()
