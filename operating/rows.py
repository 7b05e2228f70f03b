"""What replicas answered, as rows for programs and for people.  Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

from duemq.errors import DuemqError
from duemq_cli.exits import Exit
from duemq_server.operating.groups import Replica
from duemq_server.replication.running.v1 import replication_pb2 as pb

COLUMNS = ("replica", "role", "epoch", "log_epoch", "log_end", "durable", "committed", "state")
"""What `for_people` has."""


def as_status(each: Replica, answer: pb.ReplicaStatus | DuemqError) -> dict[str, Any]:
    """Of `duemq replica status`, for programs."""
    row: dict[str, Any] = {"group": each.group, "name": each.name, "address": each.address}
    if isinstance(answer, DuemqError):
        return {**row, "error": str(answer)}
    return {
        "group": answer.group,
        "name": answer.replica.name,
        "address": each.address,
        "error": None,
        "disk": answer.replica.disk,
        "role": answer.role,
        "epoch": answer.epoch,
        "log_epoch": answer.log_epoch,
        "log_start": answer.log_start,
        "log_end": answer.log_end,
        "durable": answer.durable,
        "committed": answer.committed,
        "applied": answer.applied,
        "reason": answer.reason,
        "record": json.loads(answer.record) if answer.record else None,
    }


def for_people(row: dict[str, Any]) -> dict[str, Any]:
    """The same row, for people."""
    named = f"{row['group']}/{row['name']}" if row["name"] else row["address"]
    if row["error"]:
        figures = dict.fromkeys(COLUMNS[1:-1], "")
        return {**figures, "replica": named, "state": f"no answer: {row['error']}"}
    in_sync = [row["name"], row["disk"]] in (row["record"] or {}).get("in_sync", ())
    return {
        **{name: f"{row[name]:,}" for name in ("log_end", "durable", "committed")},
        "replica": named,
        "role": row["role"],
        "epoch": row["epoch"],
        "log_epoch": row["log_epoch"],
        "state": row["reason"] or ("in sync" if in_sync else "not in sync"),
    }


def only_others_have(
    chosen: pb.ReplicaStatus, others: Iterable[tuple[Replica, pb.ReplicaStatus | DuemqError]]
) -> list[str]:
    """What may lie on other replicas alone, in words."""
    ours = chosen.log_epoch, chosen.log_end
    lost = []
    for each, answer in others:
        if isinstance(answer, DuemqError):
            lost.append(f"{each} does not answer: what only it has is lost")
            continue
        if answer.role == "leader":
            lost.append(f"{each} leads: what it acknowledges until it hears of this is lost")
        if (answer.log_epoch, answer.log_end) > ours:
            lost.append(
                f"{each} has {answer.log_end:,} bytes of log, to epoch {answer.log_epoch}, and"
                f" {chosen.replica.name} {ours[1]:,}, to epoch {ours[0]}: what only {each} has is"
                " lost"
            )
    return lost


def changes_of(
    answers: Iterator[tuple[Replica, pb.ReplicaStatus | DuemqError]],
) -> Iterator[dict[str, Any]]:
    """Of role, as those that answered remember them."""
    for _, answer in answers:
        if isinstance(answer, DuemqError):
            continue
        for change in answer.history:
            yield {
                "group": answer.group,
                "name": answer.replica.name,
                "at_ms": change.at_ms,
                "role": change.role,
                "epoch": change.epoch,
                "reason": change.reason,
            }


def exit_of(rows: list[dict[str, Any]]) -> Exit:
    """Whether all, some or none answered."""
    silent = sum(bool(row["error"]) for row in rows)
    if silent == len(rows):
        return Exit.UNAVAILABLE
    return Exit.PARTIAL if silent else Exit.OK
