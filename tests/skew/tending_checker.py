"""Judges what clients of `tending.py` wrote down, and what lies in their topics.  Pure."""

from __future__ import annotations

from collections.abc import Iterable

from tests.cluster.checker import Event, judge

WRONGS_NAMED_MAX = 5


def faults(events: Iterable[Event]) -> list[str]:
    """Beside those of `tests.cluster.checker`: events "wrong", and schedules off their plan.

    Events "planned" have a schedule's id, how many messages it has sent, and how far apart.
    Events "beat" are its messages in the topic: when they were to be, were due and were stored.
    """
    known = list(events)
    wrong = [event["error"] for event in known if event["event"] == "wrong"]
    found = [f"wrong: {len(wrong)} ({'; '.join(wrong[:WRONGS_NAMED_MAX])})"] if wrong else []
    for plan in (event for event in known if event["event"] == "planned"):
        beats = [e for e in known if e["event"] == "beat" and e["id"] == plan["id"]]
        found += [f"{plan['id']}: {fault}" for fault in _off_plan(plan, beats)]
    return judge(known).faults + found


def _off_plan(plan: Event, beats: list[Event]) -> list[str]:
    found = []
    came = sorted(each["scheduled_ms"] for each in beats)
    first, every_ms = min(came, default=0), plan["every_ms"]
    planned = list(range(first, first + plan["count"] * every_ms, every_ms))
    if missing := sorted(set(planned) - set(came)):
        found.append(f"{len(missing)} of {plan['count']} did not come ({missing[:3]})")
    if others := sorted(set(came) - set(planned)):
        found.append(f"{len(others)} came that were not planned ({others[:3]})")
    if twice := len(came) - len(set(came)):
        found.append(f"{twice} came twice")
    if moved := [each for each in beats if each["due_ms"] != each["scheduled_ms"]]:
        found.append(f"{len(moved)} were not due when they were to be")
    if early := [each for each in beats if each["store_ms"] < each["scheduled_ms"]]:
        found.append(f"{len(early)} came early")
    return found
