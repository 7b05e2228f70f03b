from __future__ import annotations

import pytest

from duemq_server.replication.protocol.epochs import Epochs
from duemq_server.replication.protocol.leader import Leader
from duemq_server.replication.protocol.messages import Answer, Hello, Welcome
from duemq_server.replication.protocol.record import HeldRecord, Record, ReplicaId
from duemq_server.replication.running.leading import log_kept
from duemq_server.replication.running.leading.log_kept import INSTALL_MS, LogKept

A, B = (ReplicaId(name, name * 32) for name in "ab")
NOW_MS = 50_000


@pytest.fixture
def leader() -> Leader:
    record = Record("g", 7, frozenset("ab"), frozenset([A]), 1, A)
    return Leader(
        A, HeldRecord("v1", record), Epochs(), start=0, committed=0, min_insync=1, now_ms=NOW_MS
    )


def test_who_follows_needs_what_it_has_not_called_durable(leader: Leader) -> None:
    kept = LogKept(leader)
    assert kept.needed_from(NOW_MS) is None
    hello = Hello("g", 7, B, 1, (), 0, 0, 1)
    assert isinstance(leader.hello(1, hello, 900, NOW_MS), Welcome)
    assert kept.needed_from(NOW_MS) == 0
    leader.chunk(1, bytes(500), NOW_MS)
    leader.answered(1, Answer(1, B, 300, NOW_MS), 900, NOW_MS)
    assert kept.needed_from(NOW_MS) == 300
    leader.broke(1)
    assert kept.needed_from(NOW_MS) is None


def test_what_goes_with_a_snapshot_is_needed_until_its_receiver_may_follow(
    leader: Leader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_kept, "steady_ms", lambda: NOW_MS)
    kept = LogKept(leader)
    with kept.sending(800, "b"), kept.sending(400, "c"):
        assert kept.receivers(NOW_MS) == {"b", "c"}
        assert kept.needed_from(NOW_MS + 10 * INSTALL_MS) == 400
    assert kept.receivers(NOW_MS + INSTALL_MS - 1) == {"b", "c"}
    assert kept.needed_from(NOW_MS + INSTALL_MS - 1) == 400
    assert kept.needed_from(NOW_MS + INSTALL_MS) is None
    assert not kept.receivers(NOW_MS + INSTALL_MS)


def test_a_snapshot_that_did_not_arrive_needs_nothing(leader: Leader) -> None:
    kept = LogKept(leader)
    with pytest.raises(OSError, match="gone"), kept.sending(400, "b"):
        raise OSError("gone")
    assert kept.needed_from(NOW_MS) is None
