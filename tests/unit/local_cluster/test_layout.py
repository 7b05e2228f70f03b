"""What the folder of a cluster knows of its members."""

import errno
import json
import os
import socket
import sys
from contextlib import closing
from pathlib import Path

import pytest

from duemq.errors import InvalidArgument
from duemq_server.local_cluster import plan
from duemq_server.local_cluster.layout import Layout
from tests.listening import loopbacks


def planned(
    folder: Path, brokers: int | None = None, replicas: int | None = None, min_insync: int = 0
) -> list[str]:
    layout = Layout(folder)
    layout.open()
    try:
        members = plan.members_of(
            layout, nameservers=1, brokers=brokers, replicas=replicas, min_insync=min_insync
        )
        return [each.name for each in members if each.kind == "broker"]
    finally:
        layout.close()


def test_brokers_with_data_are_known_without_the_file(tmp_path: Path) -> None:
    assert planned(tmp_path) == ["broker-0", "broker-1"]
    for name in ("broker-0", "broker-2", "broker-old", "timer-0"):
        (tmp_path / name / "log").mkdir(parents=True)
    assert planned(tmp_path) == ["broker-0", "broker-1", "broker-2"]
    with pytest.raises(InvalidArgument, match="data of 3 brokers"):
        planned(tmp_path, brokers=2)
    with pytest.raises(InvalidArgument, match="1 replicas"):
        planned(tmp_path, replicas=3)


def test_so_are_replicas(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / "broker-0" / name).mkdir(parents=True)
    (tmp_path / "timer-0" / "a").mkdir(parents=True)
    assert planned(tmp_path) == ["broker-0/a", "broker-0/b", "broker-0/c"]
    with pytest.raises(InvalidArgument, match="3 replicas"):
        planned(tmp_path, replicas=1)


def test_a_replica_whose_data_is_gone_counts_where_later_ones_have_theirs(tmp_path: Path) -> None:
    for name in "ac":
        (tmp_path / "broker-0" / name).mkdir(parents=True)
    assert planned(tmp_path) == ["broker-0/a", "broker-0/b", "broker-0/c"]


def test_more_in_sync_than_there_are_replicas_is_refused(tmp_path: Path) -> None:
    assert planned(tmp_path, brokers=1, min_insync=1) == ["broker-0"]
    assert planned(tmp_path, brokers=1, replicas=2, min_insync=2) == ["broker-0/a", "broker-0/b"]
    for replicas in (None, 2):
        with pytest.raises(InvalidArgument, match=r"min_insync: 3 .*at most the replicas"):
            planned(tmp_path, replicas=replicas, min_insync=3)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a port has no mark")
def test_a_port_that_one_cluster_holds_is_taken_for_another_before_anybody_listens(
    tmp_path: Path,
) -> None:
    with closing(Layout(tmp_path)) as one, closing(Layout(tmp_path)) as other:
        port = one.hold(0)
        for _ in range(2):  # what failed has left nothing behind
            with pytest.raises(OSError, match="in use") as refused:
                other.hold(port)
            assert refused.value.errno == errno.EADDRINUSE
        one.close()
        assert other.hold(port) == port


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a port has no mark")
@pytest.mark.skipif("[::1]" not in loopbacks(), reason="no IPv6")
@pytest.mark.parametrize(
    ("first", "second"),
    [("127.0.0.1", "0.0.0.0"), ("0.0.0.0", "127.0.0.1"), ("::", "0.0.0.0"), ("127.0.0.1", "::")],
)
def test_a_port_of_every_address_is_one_of_each(first: str, second: str, tmp_path: Path) -> None:
    with closing(Layout(tmp_path)) as one, closing(Layout(tmp_path)) as other:
        port = one.hold(0, first)
        with pytest.raises(OSError, match="in use") as refused:
            other.hold(port, second)
        assert refused.value.errno == errno.EADDRINUSE
        one.close()
        assert other.hold(port, second) == port


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere 127.0.0.2 is no address")
def test_two_addresses_have_a_port_each(tmp_path: Path) -> None:
    with closing(Layout(tmp_path)) as one, closing(Layout(tmp_path)) as other:
        assert other.hold(one.hold(0, "127.0.0.1"), "127.0.0.2")


def test_where_a_sandbox_forbids_marks_ports_are_held_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = socket.socket

    def refused(family: int, *rest: int) -> socket.socket:
        if family == socket.AF_UNIX:
            raise OSError(errno.EAFNOSUPPORT, os.strerror(errno.EAFNOSUPPORT))
        return make(family, *rest)

    monkeypatch.setattr(socket, "socket", refused)
    with closing(Layout(tmp_path)) as layout:
        assert layout.hold(0)


@pytest.mark.parametrize("port", [70_000, -1, "many", None])
def test_a_port_that_is_none_is_told_with_the_file(port: object, tmp_path: Path) -> None:
    content = {"version": 1, "ports": {"broker-0": port}}
    (tmp_path / "cluster.json").write_text(json.dumps(content))
    with pytest.raises(InvalidArgument, match=r"cluster\.json is not a cluster file"):
        Layout(tmp_path).open()


def test_ports_are_on_disk_before_they_take_the_place_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[tuple[int, int]] = []

    def fsync(file: int) -> None:
        found = os.fstat(file)
        synced.append((found.st_ino, found.st_size))

    monkeypatch.setattr(os, "fsync", fsync)
    Layout(tmp_path).remember("broker-0", 4_711)
    found = (tmp_path / "cluster.json").stat()
    assert synced == [(found.st_ino, found.st_size)]
