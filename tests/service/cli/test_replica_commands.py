"""`duemq replica`, with a real nameserver and replicas that are played."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any

import pytest

from duemq import errors
from duemq.transport import channel
from duemq.v1 import nameserver_pb2, stubs
from duemq_cli.app import cli
from duemq_cli.exits import Exit
from duemq_server.nameserver.settings import Settings
from duemq_server.replication.running.v1 import replication_pb2 as pb
from duemq_server.serving.server import Server
from tests.service.cli.commands import rows, run
from tests.service.running_cluster import running_cluster

SERVICE = pb.DESCRIPTOR.services_by_name["Replication"]
NOBODY = "127.0.0.1:1"


@dataclass
class Played:
    """One replica's service."""

    name: str
    role: str = "follower"
    in_sync: bool = True
    changes: list[pb.Change] = field(default_factory=list)
    decided: list[tuple[str, bool]] = field(default_factory=list)
    accept_loss: bool = False
    """What was said last."""
    handed_to: list[str] = field(default_factory=list)
    address: str = ""
    log: tuple[int, int] = (3, 12_345)
    """Its last epoch and its end."""

    async def GetStatus(self, request: pb.GetStatusRequest, context: Any) -> pb.ReplicaStatus:
        in_sync = [[self.name, "d"]] if self.in_sync else []
        return pb.ReplicaStatus(
            group="g",
            replica=pb.ReplicaId(name=self.name, disk="d"),
            role=self.role,
            epoch=3,
            log_epoch=self.log[0],
            log_end=self.log[1],
            record=json.dumps({"in_sync": in_sync}),
            history=self.changes,
        )

    Follow = GetSnapshot = GetStatus  # nobody asks for them

    async def HandOver(self, request: pb.HandOverRequest, context: Any) -> pb.HandOverResponse:
        if self.role != "leader":
            raise errors.Unavailable("it does not lead", field="leader")
        self.handed_to.append(request.to)
        return pb.HandOverResponse(leader=request.to, epoch=4)

    async def Adopt(self, request: pb.DecideRequest, context: Any) -> pb.Decided:
        return self._decided("adopt", request)

    async def Elect(self, request: pb.DecideRequest, context: Any) -> pb.Decided:
        return self._decided("elect", request)

    async def ChangeMembers(self, request: pb.ChangeMembersRequest, context: Any) -> pb.Decided:
        if self.role != "leader":
            raise errors.Unavailable("it does not lead", field="leader")
        if request.remove == "b" and not request.accepted:
            raise errors.InvalidArgument("min_insync is 2", field="replica")
        what = request.WhichOneof("change")
        self.decided.append((f"{what} {getattr(request, what)}", request.confirmed))
        return pb.Decided(text="members are so", done=request.confirmed)

    def _decided(self, what: str, request: pb.DecideRequest) -> pb.Decided:
        self.decided.append((what, request.confirmed))
        self.accept_loss = request.accept_loss
        if request.confirmed:
            return pb.Decided(text="it leads", done=True)
        return pb.Decided(text="4096 bytes would be lost")


class Group:
    """The broker g, of replicas a (leads) and b, as a nameserver knows it."""

    def __init__(self, nameserver: str, replicas: list[Played]) -> None:
        self.nameserver = nameserver
        self.replicas = {each.name: each for each in replicas}

    async def register(self, **addresses: str) -> None:
        """As the leader does; `addresses` instead of where they are."""
        report = nameserver_pb2.BrokerReport(name="g", address=self.replicas["a"].address)
        for each in self.replicas.values():
            role = nameserver_pb2.ReplicaRole.Value(each.role.upper())
            address = addresses.get(each.name, each.address)
            report.replicas.add(name=each.name, role=role, address=address)
        for name in addresses.keys() - self.replicas.keys():
            report.replicas.add(name=name, role=nameserver_pb2.AWAY, address=addresses[name])
        await self._call(
            lambda to: to.Register(
                nameserver_pb2.RegisterRequest(
                    version=nameserver_pb2.Version(epoch=1, counter=len(addresses)), broker=report
                )
            )
        )

    async def lose(self) -> None:
        """Nobody leads any more."""
        version = nameserver_pb2.Version(epoch=1, counter=9)
        request = nameserver_pb2.DeregisterRequest(version=version, broker="g")
        await self._call(lambda to: to.Deregister(request))

    async def _call(self, call: Callable[[stubs.NameserverStub], Any]) -> None:
        async with channel.connect(self.nameserver) as connection:
            await call(stubs.NameserverStub(connection))


@pytest.fixture
async def group(tmp_path) -> AsyncIterator[Group]:
    replicas = [Played("a", role="leader"), Played("b")]
    async with AsyncExitStack() as stack:
        cluster = await stack.enter_async_context(running_cluster(tmp_path))
        for each in replicas:
            server = Server(Settings(listen="127.0.0.1:0", drain_timeout=0.0))
            server.add(SERVICE, each)
            await server.start(announced=False)
            stack.push_async_callback(server.stop)
            each.address = server.address
        played = Group(cluster.nameserver, replicas)
        await played.register()
        yield played


async def duemq(group: Group, *arguments: str):
    return await run(group.nameserver, "replica", *arguments)


async def test_status_is_what_each_says_of_itself(group: Group) -> None:
    group.replicas["b"].in_sync = False
    [a, b] = rows(await duemq(group, "status", "g", "--json"))
    assert (a["group"], a["name"], a["role"], a["epoch"], a["error"]) == (
        "g",
        "a",
        "leader",
        3,
        None,
    )
    assert a["record"] == {"in_sync": [["a", "d"]]}
    assert b["name"] == "b"
    people = await duemq(group, "status", "g")
    assert people.exit_code == Exit.OK
    first, second = people.stdout.splitlines()[-2:]
    assert ("g/a" in first, "leader" in first, "12,345" in first) == (True, True, True)
    assert first.endswith(" in sync")
    assert second.endswith("not in sync")


async def test_one_that_does_not_answer_is_said(group: Group) -> None:
    await group.register(b=NOBODY)
    done = await duemq(group, "status", "g", "--json")
    assert done.exit_code == Exit.PARTIAL
    [_, b] = rows(done)
    assert NOBODY in b["error"]
    assert "g/b" in (await duemq(group, "status", "g")).stdout
    await group.register(b="", a=NOBODY)
    assert (await duemq(group, "status", "g")).exit_code == Exit.UNAVAILABLE


async def test_a_replica_is_asked_at_its_address_too(group: Group) -> None:
    [only] = rows(await duemq(group, "status", group.replicas["b"].address, "--json"))
    assert (only["group"], only["name"]) == ("g", "b")


async def test_history_is_that_of_all_in_order(group: Group) -> None:
    group.replicas["a"].changes = [pb.Change(at_ms=2_000, role="leader", epoch=3, reason="b died")]
    group.replicas["b"].changes = [
        pb.Change(at_ms=1_000, role="leader", epoch=2, reason="founded"),
        pb.Change(at_ms=3_000, role="follower", epoch=3),
    ]
    told = rows(await duemq(group, "history", "g", "--json"))
    assert [(row["at_ms"], row["name"], row["role"], row["epoch"]) for row in told] == [
        (1_000, "b", "leader", 2),
        (2_000, "a", "leader", 3),
        (3_000, "b", "follower", 3),
    ]
    assert "b died" in (await duemq(group, "history", "g")).stdout
    await group.register(a=NOBODY)
    partial = await duemq(group, "history", "g", "--json")
    assert partial.exit_code == Exit.PARTIAL
    assert rows(partial)[-1]["name"] == "a"


@pytest.mark.parametrize("noun", ["replica", "broker"])
async def test_lead_asks_whoever_leads(group: Group, noun: str) -> None:
    done = await run(group.nameserver, noun, "lead", "g/b", "--json")
    assert rows(done) == [{"group": "g", "name": "b", "epoch": 4}]
    assert group.replicas["a"].handed_to == ["b"]
    group.replicas["a"].role = "follower"  # the nameserver does not know yet
    refused = await run(group.nameserver, noun, "lead", "g/b")
    assert refused.exit_code == Exit.UNAVAILABLE
    assert "does not lead" in refused.stderr


@pytest.mark.parametrize(
    ("target", "exit_code"),
    [
        ("g", Exit.USAGE),
        ("127.0.0.1:1", Exit.USAGE),
        ("127.0.0.1:1/a", Exit.UNAVAILABLE),
        ("other/a", Exit.NOT_FOUND),
    ],
)
async def test_lead_of_what_is_no_replica_is_refused(
    group: Group, target: str, exit_code: Exit
) -> None:
    assert (await duemq(group, "lead", target)).exit_code == exit_code


async def test_elect_says_what_would_be_lost_and_does_it_when_told_again(group: Group) -> None:
    await group.lose()
    b = group.replicas["b"]
    first = await duemq(group, "elect", "g/b")
    assert first.exit_code == Exit.FAILED
    assert "4096 bytes would be lost" in first.stderr
    assert "--accept-loss" in first.stdout
    assert (await duemq(group, "elect", "g/b", "--yes")).exit_code == Exit.FAILED
    assert b.decided == [("elect", False)] * 2
    [done] = rows(await duemq(group, "elect", "g/b", "--accept-loss", "--json"))
    assert (done["done"], done["text"]) == (True, "it leads")
    assert b.decided[2:] == [("elect", False), ("elect", True)]


async def test_elect_says_which_other_one_has_more(group: Group) -> None:
    """Nobody in sync is left: of the others the one that has most is to be chosen."""
    a, b = group.replicas["a"], group.replicas["b"]
    a.role, a.log = "joining", (3, 12_346)
    refused = await duemq(group, "elect", "g/b")
    assert "what only g/a has is lost" in refused.stderr
    assert b.decided == [("elect", False)]
    assert "what only" not in (await duemq(group, "elect", "g/a")).stderr


async def test_members_are_changed_by_the_leader_when_told_again(group: Group) -> None:
    a = group.replicas["a"]
    first = await duemq(group, "remove", "g/c")
    assert (first.exit_code, first.stderr) == (Exit.FAILED, "g/c: members are so\n")
    assert "--yes" in first.stdout
    assert a.decided == [("remove c", False)]
    done = await duemq(group, "remove", "g/c", "--yes")
    assert (done.exit_code, done.stdout) == (Exit.OK, "g/c: done\n")
    assert a.decided[1:] == [("remove c", False), ("remove c", True)]
    [row] = rows(await duemq(group, "add", "g", "d", "--yes", "--json"))
    assert (row["group"], row["name"], row["address"]) == ("g", "d", a.address)
    assert (row["done"], row["text"]) == (True, "members are so")
    assert a.decided[3:] == [("add d", False), ("add d", True)]


async def test_fewer_than_min_insync_are_left_with_accept_alone(group: Group) -> None:
    refused = await duemq(group, "remove", "g/b", "--yes")
    assert refused.exit_code == Exit.USAGE
    assert "min_insync" in refused.stderr
    assert (await duemq(group, "remove", "g/b", "--accept", "--yes")).exit_code == Exit.OK


async def test_members_are_changed_at_an_address_where_no_nameserver_knows_who_leads(
    group: Group,
) -> None:
    await group.lose()
    a, b = group.replicas["a"], group.replicas["b"]
    assert (await duemq(group, "add", a.address, "d", "--yes")).exit_code == Exit.OK
    assert a.decided[-1] == ("add d", True)
    refused = await duemq(group, "add", b.address, "d", "--yes")
    assert refused.exit_code == Exit.UNAVAILABLE
    assert "does not lead" in refused.stderr
    nobody = await duemq(group, "add", group.nameserver, "d", "--yes")
    assert nobody.exit_code == Exit.USAGE
    assert f"{group.nameserver} is no replica" in nobody.stderr


async def test_adopt_without_a_terminal_wants_a_yes(group: Group) -> None:
    group.replicas["a"].role = "joining"
    b = group.replicas["b"]
    refused = await duemq(group, "adopt", b.address, "--json")
    assert refused.exit_code == Exit.FAILED
    [row] = rows(refused)
    assert (row["done"], row["address"]) == (False, b.address)
    assert b.decided == [("adopt", False)]
    done = await duemq(group, "adopt", "g/b", "--yes")
    assert (done.exit_code, b.decided[1:]) == (Exit.OK, [("adopt", False), ("adopt", True)])
    assert not b.accept_loss
    await duemq(group, "adopt", "g/b", "--yes", "--accept-loss")
    assert not b.accept_loss  # there is none: the group need not be a new store


@pytest.mark.parametrize("log", [(3, 12_346), (4, 99)])
async def test_adopt_says_what_only_others_have_and_does_it_when_told_twice(
    group: Group, log: tuple[int, int]
) -> None:
    a, b = group.replicas["a"], group.replicas["b"]
    a.log, a.role = log, "joining"
    for target in ("g/b", b.address):
        refused = await duemq(group, "adopt", target, "--yes")
        assert refused.exit_code == Exit.FAILED
        assert f"g/a has {log[1]:,} bytes of log, to epoch {log[0]}, and b 12,345" in refused.stderr
        assert "--accept-loss" in refused.stdout
    [row] = rows(await duemq(group, "adopt", "g/b", "--yes", "--json"))
    assert (row["done"], "what only g/a has is lost" in row["text"]) == (False, True)
    assert ("adopt", True) not in b.decided
    assert (await duemq(group, "adopt", "g/b", "--accept-loss")).exit_code == Exit.FAILED
    assert ("adopt", True) not in b.decided
    done = await duemq(group, "adopt", "g/b", "--accept-loss", "--yes")
    assert (done.exit_code, b.decided[-1]) == (Exit.OK, ("adopt", True))
    assert b.accept_loss
    assert (await duemq(group, "adopt", "g/a", "--yes")).exit_code == Exit.OK


async def test_adopt_says_who_still_leads(group: Group) -> None:
    """It may not reach the store, and commits with those that hear it."""
    b = group.replicas["b"]
    refused = await duemq(group, "adopt", "g/b", "--yes")
    assert refused.exit_code == Exit.FAILED
    assert "g/a leads: what it acknowledges" in refused.stderr
    assert b.decided == [("adopt", False)]


async def test_what_only_who_leads_has_is_lost_too(group: Group) -> None:
    a, b = group.replicas["a"], group.replicas["b"]
    a.log = b.log[0], b.log[1] + 8
    for command in ("adopt", "elect"):
        refused = await duemq(group, command, "g/b", "--yes")
        assert "g/a leads: what it acknowledges" in refused.stderr
        assert "what only g/a has is lost" in refused.stderr


async def test_adopt_takes_who_does_not_answer_for_one_that_has_more(group: Group) -> None:
    b = group.replicas["b"]
    await group.register(a=NOBODY)
    refused = await duemq(group, "adopt", "g/b", "--yes")
    assert refused.exit_code == Exit.FAILED
    assert "g/a does not answer: what only it has is lost" in refused.stderr
    assert b.decided == [("adopt", False)]
    done = await duemq(group, "adopt", "g/b", "--yes", "--accept-loss")
    assert (done.exit_code, b.decided[-1]) == (Exit.OK, ("adopt", True))
    alone = await run(NOBODY, "replica", "adopt", b.address, "--yes")
    assert alone.exit_code == Exit.FAILED
    assert "what only others have is lost" in alone.stderr


@pytest.mark.parametrize(
    ("target", "told"), [("other/a", "other"), ("g/z", "'z', but a, b, c"), ("g/c", "HOST:PORT")]
)
async def test_who_cannot_be_found_is_named(group: Group, target: str, told: str) -> None:
    await group.register(c="")
    refused = await duemq(group, "adopt", target)
    assert refused.exit_code == Exit.NOT_FOUND
    assert told in refused.stderr


async def test_a_broker_without_replicas_has_none(tmp_path) -> None:
    async with running_cluster(tmp_path, "b0") as cluster:
        refused = await run(cluster.nameserver, "replica", "status", "b0")
        assert refused.exit_code == Exit.NOT_FOUND
        assert "has no replicas" in refused.stderr


async def test_without_a_nameserver_nothing_is_known() -> None:
    refused = await run(NOBODY, "replica", "status", "g")
    assert refused.exit_code == Exit.UNAVAILABLE


def test_both_nouns_have_the_same_commands() -> None:
    context = None
    found = [cli.get_command(context, noun).commands for noun in ("replica", "broker")]
    assert found[0] == found[1]
    assert set(found[0]) == {"status", "history", "lead", "adopt", "elect", "add", "remove"}
