"""Judges a recorded history of a cluster test.  Pure.

A history is a list of events, kept as JSON Lines (`dump`, `load`) so that a failed run can be
judged again.  Fields: `event`, `id` (unique a message) and

    sent       at_ms                           before the client was asked to send it
    acked      at_ms, due_ms (0: none)         the client had its receipt; if it says where,
                                               broker, queue, offset
    failed     at_ms                           the send failed; it may be stored or not
    cancelled  outcome: cancelled|fired|unknown
    received   group, at_ms, broker, queue, offset
    stored     broker, queue, offset, store_ms one record of the topic's log, read at the end

`judge` proves, or names what contradicts:
 - no acknowledged loss: acked and not cancelled → in the log once, and received by every group;
 - exactly once in the log, unless the send failed and was repeated by the *application*;
 - never early: neither stored nor received before due_ms;
 - what was acknowledged lies where the receipt says: two leaders never gave one place away;
 - a message answered `cancelled` is nowhere; one answered `fired` is in the log;
 - nothing made up: what is in the log was sent;
 - order: ids of one `key` lie in each queue in the order in which they were sent.
It counts what at-least-once delivery allows: messages that a group received more than once.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Event = dict[str, Any]
PLACE = ("broker", "queue", "offset")
IDS_NAMED_MAX = 10


@dataclass
class Verdict:
    """What the history proves.  Empty lists: no fault found."""

    lost_in_log: list[str] = field(default_factory=list)
    lost_at_group: dict[str, list[str]] = field(default_factory=dict)
    twice_in_log: list[str] = field(default_factory=list)
    elsewhere: list[str] = field(default_factory=list)
    early: list[str] = field(default_factory=list)
    cancelled_yet_delivered: list[str] = field(default_factory=list)
    made_up: list[str] = field(default_factory=list)
    out_of_order: list[str] = field(default_factory=list)
    # Allowed: repeats at consumers, by group.
    repeated: dict[str, int] = field(default_factory=dict)
    acked: int = 0
    stored: int = 0
    late_max_ms: int = 0

    @property
    def faults(self) -> list[str]:
        """Every fault in words."""
        named = {
            "acknowledged and not in the log": self.lost_in_log,
            "more than once in the log": self.twice_in_log,
            "not where its receipt says": self.elsewhere,
            "early": self.early,
            "cancelled and yet delivered": self.cancelled_yet_delivered,
            "in the log, never sent": self.made_up,
            "out of order": self.out_of_order,
        }
        for group, ids in self.lost_at_group.items():
            named[f"never received by {group}"] = ids
        return [
            f"{fault}: {len(ids)} ({', '.join(ids[:IDS_NAMED_MAX])})"
            for fault, ids in named.items()
            if ids
        ]


def judge(history: Iterable[Event], groups: Sequence[str] = ()) -> Verdict:
    """Judges a history against the rules above, for these consumer groups."""
    by_event: dict[str, list[Event]] = defaultdict(list)
    for event in history:
        by_event[event["event"]].append(event)
    sent = {event["id"] for event in by_event["sent"]}
    due_ms = {event["id"]: event["due_ms"] for event in by_event["acked"]}
    outcomes = {event["id"]: event["outcome"] for event in by_event["cancelled"]}
    gone = {id for id, outcome in outcomes.items() if outcome == "cancelled"}
    must = due_ms.keys() - gone
    counts = Counter(event["id"] for event in by_event["stored"])

    verdict = Verdict(acked=len(due_ms), stored=len(by_event["stored"]))
    fired = {id for id, outcome in outcomes.items() if outcome == "fired"}
    verdict.lost_in_log = sorted((must | fired) - counts.keys())
    verdict.twice_in_log = sorted(id for id, count in counts.items() if count > 1)
    verdict.made_up = sorted(counts.keys() - sent)
    received = {event["id"] for event in by_event["received"]}
    verdict.cancelled_yet_delivered = sorted(gone & (counts.keys() | received))
    verdict.elsewhere = _elsewhere(by_event["acked"], by_event["stored"])
    verdict.early = _early(by_event, due_ms)
    verdict.out_of_order = _out_of_order(by_event["sent"], by_event["stored"])
    for group in groups:
        ids = [e["id"] for e in by_event["received"] if e["group"] == group]
        verdict.lost_at_group[group] = sorted(must - set(ids))
        verdict.repeated[group] = len(ids) - len(set(ids))
    late = [e["store_ms"] - due_ms[e["id"]] for e in by_event["stored"] if due_ms.get(e["id"])]
    verdict.late_max_ms = max(late, default=0)
    return verdict


def _elsewhere(acked: list[Event], stored: list[Event]) -> list[str]:
    places = {event["id"]: [event[name] for name in PLACE] for event in stored}
    told = {event["id"]: [event[name] for name in PLACE] for event in acked if "offset" in event}
    return sorted(id for id, place in told.items() if places.get(id, place) != place)


def _early(by_event: dict[str, list[Event]], due_ms: dict[str, int]) -> list[str]:
    early = {e["id"] for e in by_event["stored"] if e["store_ms"] < due_ms.get(e["id"], 0)}
    early |= {e["id"] for e in by_event["received"] if e["at_ms"] < due_ms.get(e["id"], 0)}
    return sorted(early)


def _out_of_order(sent: list[Event], stored: list[Event]) -> list[str]:
    """Ids that lie in a queue before one of the same key that was sent earlier."""
    rank = {event["id"]: place for place, event in enumerate(sent)}
    key = {event["id"]: event.get("key") for event in sent}
    last: dict[tuple[str, str, int], int] = {}
    wrong = []
    for event in sorted(stored, key=lambda e: (e["broker"], e["queue"], e["offset"])):
        id = event["id"]
        if not key.get(id):
            continue
        place = (key[id], event["broker"], event["queue"])
        if rank[id] < last.get(place, -1):
            wrong.append(id)
        last[place] = max(rank[id], last.get(place, -1))
    return sorted(wrong)


def dump(history: Iterable[Event], path: Path) -> None:
    """Writes a history, an event a line."""
    path.write_text("".join(json.dumps(event) + "\n" for event in history), encoding="utf-8")


def load(path: Path) -> list[Event]:
    """Reads what `dump` wrote."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
