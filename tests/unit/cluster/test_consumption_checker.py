"""The consumption checker finds every planted fault, and none in a clean history."""

import pytest

from tests.cluster.consumption_checker import Event, Rules, judge, mark_of

TOPIC, RETRY, DEAD = ["t", "b", 0], ["%RETRY%g", "b", 0], ["%DLQ%g", "b", 0]
MS = 1_000_000
IN_ORDER = Rules("key", in_order_max=3)
CONCURRENT = Rules(None, retries_max=2)


def acquired(member: str, generation: int, offset: int, at: int, **more: object) -> Event:
    event = {"event": "acquired", "member": member, "queue": TOPIC, "generation": generation}
    times = {"sent_at": (at - 1) * MS, "at": at * MS}
    return {**event, "offset": offset, "settled": [], **times, **more}


def committed(member: str, generation: int, offset: int, at: int, queue: list = TOPIC) -> Event:
    event = {"event": "committed", "member": member, "queue": queue, "generation": generation}
    return {**event, "offset": offset, "sent_at": at * MS, "at": (at + 1) * MS}


def run(
    member: str,
    id: str,
    offset: int,
    start: int,
    end: int | None,
    *,
    ok: bool = True,
    queue: list = TOPIC,
    attempt: int = 0,
    looked_at: int | None = None,
) -> list[Event]:
    event = {"member": member, "id": id, "queue": queue, "offset": offset}
    look = {"worker": offset, "looked_at": (start if looked_at is None else looked_at) * MS}
    began = {**event, "event": "started", "attempt": attempt, "at": start * MS, **look}
    if end is None:
        return [began]
    return [began, {**event, "event": "ended", "ok": ok, "at": end * MS}]


def sent(id: str, *, failures: int = 0) -> list[Event]:
    message = {"event": "sent", "id": id, "key": id[0], "failures": failures}
    return [message, {"event": "acked", "id": id}]


def stored(
    id: str, queue: list, offset: int, attempt: int = 0, source: list | None = None
) -> Event:
    place = {"queue": queue, "offset": offset}
    return {"event": "stored", "id": id, "attempt": attempt, "source": source, **place}


def progress(queue: list, offset: int, end: int) -> Event:
    return {"event": "progress", "queue": queue, "offset": offset, "end": end}


def happened(event: str, member: str, at: int) -> Event:
    return {"event": event, "member": member, "at": at * MS}


def returned(member: str, offset: int, at: int, queue: list = TOPIC) -> Event:
    place = {"queue": queue, "offset": offset, "dead_letter": False, "duplicate": False}
    return {"event": "returned", "member": member, **place, "sent_at": at * MS, "at": at * MS}


def log_of(*ids: str) -> list[Event]:
    """Each sent, acknowledged, stored; and the group at the end of the queue."""
    events = [event for id in ids for event in sent(id)]
    events += [stored(id, TOPIC, offset) for offset, id in enumerate(ids)]
    return [*events, progress(TOPIC, len(ids), len(ids))]


def calm() -> list[Event]:
    """x1 x2 y1 consumed by m1, which hands over cleanly to m2 for y2."""
    return [
        *log_of("x1", "x2", "y1", "y2"),
        acquired("m1", 1, 0, 10),
        {"event": "assigned", "member": "m1", "generation": 1, "queues": [TOPIC], "at": 9 * MS},
        *run("m1", "x1", 0, 11, 13),
        *run("m1", "y1", 2, 12, 14),
        *run("m1", "x2", 1, 14, 15),
        committed("m1", 1, 3, 20),
        acquired("m2", 2, 3, 30),
        {"event": "assigned", "member": "m2", "generation": 2, "queues": [TOPIC], "at": 25 * MS},
        *run("m2", "y2", 3, 31, 32),
        committed("m2", 2, 4, 40),
    ]


def killed() -> list[Event]:
    """m1 is killed with x1, x2 done, only x1 committed, and y1 begun; m2 repeats the tail."""
    return [
        *log_of("x1", "x2", "y1"),
        acquired("m1", 1, 0, 10),
        *run("m1", "x1", 0, 11, 13),
        committed("m1", 1, 1, 13),
        *run("m1", "x2", 1, 14, 15),
        *run("m1", "y1", 2, 15, None),
        happened("killed", "m1", 16),
        acquired("m2", 2, 1, 30),
        *run("m2", "x2", 1, 31, 32),
        *run("m2", "y1", 2, 31, 32),
        committed("m2", 2, 3, 40),
    ]


def paused() -> list[Event]:
    """m1 is paused at the door of x2; m2 goes on meanwhile."""
    return [
        *log_of("x1", "x2", "x3"),
        acquired("m1", 1, 0, 10),
        *run("m1", "x1", 0, 11, 12),
        happened("paused", "m1", 14),
        acquired("m2", 2, 0, 30),
        *run("m2", "x1", 0, 31, 32),
        *run("m2", "x2", 1, 33, 34),
        *run("m2", "x3", 2, 35, 36),
        committed("m2", 2, 3, 40),
        *run("m1", "x2", 1, 52, 53, looked_at=13),
        happened("fenced", "m1", 54),
    ]


def retried() -> list[Event]:
    """x1 fails once and is sent back; y1 fails for ever and ends as a dead letter."""
    events = sent("x1", failures=1) + sent("y1", failures=99)
    events += [stored("x1", TOPIC, 0), stored("y1", TOPIC, 1)]
    events += [stored("x1", RETRY, 0, 1, [TOPIC, 0]), stored("y1", RETRY, 1, 1, [TOPIC, 1])]
    events += [stored("y1", RETRY, 2, 2, [RETRY, 1]), stored("y1", DEAD, 0, 3, [RETRY, 2])]
    events += [progress(TOPIC, 2, 2), progress(RETRY, 3, 3)]
    events += [acquired("m1", 1, 0, 10), acquired("m1", 1, 0, 10, queue=RETRY)]
    events += [*run("m1", "x1", 0, 11, 12, ok=False), returned("m1", 0, 13)]
    events += [*run("m1", "y1", 1, 11, 12, ok=False), returned("m1", 1, 13)]
    events += [committed("m1", 1, 2, 14)]
    events += run("m1", "x1", 0, 20, 21, queue=RETRY, attempt=1)
    events += run("m1", "y1", 1, 20, 21, ok=False, queue=RETRY, attempt=1)
    events += [returned("m1", 1, 22, RETRY)]
    events += run("m1", "y1", 2, 24, 25, ok=False, queue=RETRY, attempt=2)
    events += [returned("m1", 2, 26, RETRY)]
    return [*events, committed("m1", 1, 3, 28, RETRY)]


def kept(member: str, offset: int, at: int, queue: list = TOPIC) -> Event:
    place = {"queue": queue, "offset": offset}
    return {"event": "kept", "member": member, **place, "at": at * MS}


def called_again() -> list[Event]:
    """x1 fails twice, the first time while its broker takes nothing back; y1 once, likewise."""
    events = sent("x1", failures=2) + sent("y1", failures=1)
    events += [stored("x1", TOPIC, 0), stored("y1", TOPIC, 1)]
    events += [stored("x1", RETRY, 0, 2, [TOPIC, 0])]
    events += [progress(TOPIC, 2, 2), progress(RETRY, 1, 1)]
    events += [acquired("m1", 1, 0, 10), acquired("m1", 1, 0, 10, queue=RETRY)]
    for id, offset in (("x1", 0), ("y1", 1)):
        events += [*run("m1", id, offset, 11, 12, ok=False), kept("m1", offset, 13)]
        events += run("m1", id, offset, 15, 16, ok=id == "y1", attempt=1)
    events += [returned("m1", 0, 17), committed("m1", 1, 2, 18)]
    events += run("m1", "x1", 0, 20, 21, queue=RETRY, attempt=2)
    return [*events, committed("m1", 1, 1, 28, RETRY)]


def kept_to_the_end() -> list[Event]:
    """y1 fails for ever; its broker keeps its last retry from going back, and takes it then."""
    events = [e for e in retried() if e.get("event") != "stored" or e["queue"] is not DEAD]
    events += [stored("y1", DEAD, 0, 4, [RETRY, 2]), kept("m1", 2, 26, RETRY)]
    return [*events, *run("m1", "y1", 2, 26.5, 27, ok=False, queue=RETRY, attempt=3)]


@pytest.mark.parametrize(
    ("history", "rules"),
    [
        (called_again(), CONCURRENT),
        (kept_to_the_end(), CONCURRENT),
        (calm(), IN_ORDER),
        (calm(), CONCURRENT),
        (killed(), IN_ORDER),
        (killed(), CONCURRENT),
        (paused(), IN_ORDER),
        (retried(), CONCURRENT),
    ],
)
def test_a_clean_history_has_no_faults(history: list[Event], rules: Rules) -> None:
    assert judge(history, rules).faults == []


def test_the_verdict_counts() -> None:
    verdict = judge(retried(), CONCURRENT)
    assert (verdict.messages, verdict.retried, verdict.dead_letters) == (2, 3, 1)
    verdict = judge(killed(), CONCURRENT)
    assert (verdict.deliveries, verdict.holdings, verdict.repeated) == (5, 2, 2)


def test_an_in_place_retry_and_its_dead_letter_in_order() -> None:
    history = sent("x1", failures=1) + sent("x2", failures=9) + sent("x3")
    history += [stored(id, TOPIC, offset) for offset, id in enumerate(("x1", "x2", "x3"))]
    history += [stored("x2", DEAD, 0, 3, [TOPIC, 1]), progress(TOPIC, 3, 3)]
    history += [acquired("m1", 1, 0, 10), *run("m1", "x1", 0, 11, 12, ok=False)]
    history += run("m1", "x1", 0, 13, 14)
    for at in (15, 17, 19):
        history += run("m1", "x2", 1, at, at + 1, ok=False)
    history += [returned("m1", 1, 21), *run("m1", "x3", 2, 22, 23), committed("m1", 1, 3, 24)]
    assert judge(history, IN_ORDER).faults == []
    early = [e for e in history if e["event"] not in ("started", "ended") or e["id"] != "x3"]
    assert rules_broken([*early, *run("m1", "x3", 2, 16, 17)], IN_ORDER) == {"out_of_order"}


def rules_broken(history: list[Event], rules: Rules) -> set[str]:
    return set(judge(history, rules).faults_by_rule)


def without(history: list[Event], event: str, **fields: object) -> list[Event]:
    """The history less the events that match."""
    wanted = {"event": event, **fields}.items()
    return [each for each in history if not wanted <= _hashable(each)]


def changed(history: list[Event], event: str, new: dict[str, object], **fields: object) -> list:
    """The history with `new` in the events that match."""
    wanted = {"event": event, **fields}.items()
    return [{**each, **new} if wanted <= _hashable(each) else each for each in history]


def _hashable(event: Event) -> set[tuple[str, object]]:
    simple = (str, int, bool, type(None))
    return {(name, value) for name, value in event.items() if isinstance(value, simple)}


PLANTED = {
    "acknowledged and not in the log": (
        without(calm(), "stored", id="y2"),
        CONCURRENT,
        {"lost"},
    ),
    "processed by nobody": (
        without(without(calm(), "ended", id="y2"), "started", id="y2"),
        CONCURRENT,
        {"lost", "skipped"},
    ),
    "begun and never finished": (
        without(calm(), "ended", id="y2"),
        CONCURRENT,
        {"lost", "skipped"},
    ),
    "left behind": (changed(calm(), "progress", {"offset": 3}), CONCURRENT, {"lost"}),
    "a retry that nobody processed": (
        without(retried(), "ended", id="x1", at=21 * MS),
        CONCURRENT,
        {"lost", "skipped"},
    ),
    "stored twice": ([*calm(), stored("x1", TOPIC, 9)], CONCURRENT, {"stored_twice", "lost"}),
    "stored and never sent": (
        without(without(calm(), "sent", id="x1"), "acked", id="x1"),
        CONCURRENT,
        {"stored_twice"},
    ),
    "committed before it was done": (
        changed(calm(), "committed", {"sent_at": 14 * MS}, member="m1"),
        CONCURRENT,
        {"skipped"},
    ),
    "committed although it failed": (
        changed(calm(), "ended", {"ok": False}, id="y2"),
        CONCURRENT,
        {"lost", "skipped"},
    ),
    "committed before the send-back was answered": (
        changed(retried(), "returned", {"at": 15 * MS}, offset=1, sent_at=13 * MS),
        CONCURRENT,
        {"skipped"},
    ),
    "committed what another holds": (
        [*calm(), committed("m3", 2, 4, 41)],
        CONCURRENT,
        {"skipped"},
    ),
    "began below a commit": (
        [*changed(calm(), "acquired", {"offset": 2}, member="m2"), *run("m2", "y1", 2, 31, 32)],
        CONCURRENT,
        {"rewound", "needless_repeat"},
    ),
    "two acquire a queue in one generation": (
        [*calm(), acquired("m3", 2, 4, 50)],
        CONCURRENT,
        {"two_owners"},
    ),
    "two are assigned a queue in one generation": (
        changed(calm(), "assigned", {"generation": 1}),
        CONCURRENT,
        {"two_owners"},
    ),
    "a zombie commits": ([*paused(), committed("m1", 1, 2, 60)], IN_ORDER, {"zombie_commit"}),
    "delivered without being acquired": (
        [*calm(), *run("m3", "x1", 0, 5, 6)],
        CONCURRENT,
        {"not_owned"},
    ),
    "delivered from before the holding": (
        [*calm(), *run("m2", "x1", 0, 33, 34)],
        CONCURRENT,
        {"not_owned", "needless_repeat"},
    ),
    "delivered although settled": (
        changed(killed(), "acquired", {"settled": [1]}, member="m2"),
        CONCURRENT,
        {"not_owned"},
    ),
    "delivered twice to a holding": (
        [*calm(), *run("m2", "y2", 3, 35, 36)],
        CONCURRENT,
        {"delivered_twice"},
    ),
    "delivered again while it runs": (
        [*calm(), *run("m2", "y2", 3, 31, None)],
        CONCURRENT,
        {"delivered_twice"},
    ),
    "repeated after a clean handover": (
        without(killed(), "killed"),
        CONCURRENT,
        {"needless_repeat"},
    ),
    "repeated though paused only later": (
        [*without(killed(), "killed"), happened("paused", "m1", 35)],
        CONCURRENT,
        {"needless_repeat"},
    ),
    "one send-back, two retries": (
        [
            *retried(),
            stored("x1", RETRY, 3, 1, [TOPIC, 0]),
            *run("m1", "x1", 3, 30, 31, queue=RETRY, attempt=1),
        ],
        CONCURRENT,
        {"retried_twice", "wrong_retries"},
    ),
    "a retry of what did not fail": (
        changed(retried(), "ended", {"ok": True}, id="x1"),
        CONCURRENT,
        {"retried_twice"},
    ),
    "a retry from nowhere": (
        changed(retried(), "stored", {"source": [TOPIC, 7]}, id="x1", attempt=1),
        CONCURRENT,
        {"retried_twice", "lost"},
    ),
    "attempts that stand still": (
        changed(retried(), "stored", {"attempt": 1}, id="y1", attempt=2),
        CONCURRENT,
        {"retried_twice"},
    ),
    "a retry too few": (
        changed(retried(), "sent", {"failures": 2}, id="x1"),
        CONCURRENT,
        {"wrong_retries"},
    ),
    "called again in place though its broker would have taken it": (
        without(called_again(), "kept"),
        CONCURRENT,
        {"wrong_retries"},
    ),
    "a try that nobody made": (
        [e for e in called_again() if e.get("at") not in (15 * MS, 16 * MS) or e["id"] != "x1"],
        CONCURRENT,
        {"wrong_retries"},
    ),
    "no dead letter": (
        changed(retried(), "stored", {"queue": RETRY, "offset": 3}, attempt=3),
        CONCURRENT,
        {"wrong_retries", "lost"},
    ),
    "began before the one ahead of it ended": (
        changed(
            changed(calm(), "started", {"at": 11 * MS}, id="x2"), "ended", {"at": 12 * MS}, id="x2"
        ),
        IN_ORDER,
        {"out_of_order", "overlapping"},
    ),
    "in queue mode another key counts, too": (
        calm(),
        Rules("queue"),
        {"out_of_order", "overlapping"},
    ),
    "out of order across two holdings": (
        [
            *log_of("x1", "x2"),
            acquired("m1", 1, 0, 10),
            *run("m1", "x1", 0, 11, None),
            happened("killed", "m1", 12),
            acquired("m2", 2, 0, 30),
            *run("m2", "x2", 1, 31, 32),
            *run("m2", "x1", 0, 33, 34),
            committed("m2", 2, 2, 40),
        ],
        IN_ORDER,
        {"out_of_order"},
    ),
    "begun by a look after the queue was lost": (
        [*paused(), *run("m1", "x3", 2, 54, 55)],
        IN_ORDER,
        {"overlapping"},
    ),
    "two begun by one look": (
        [*paused(), *run("m1", "x2", 1, 54, 55, looked_at=13)],
        IN_ORDER,
        {"overlapping", "delivered_twice"},
    ),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_is_found(fault: str) -> None:
    history, rules, broken = PLANTED[fault]
    assert rules_broken(history, rules) == broken


def test_every_rule_has_a_planted_fault() -> None:
    proved = {rule for _, _, broken in PLANTED.values() for rule in broken}
    assert proved == {
        "lost",
        "stored_twice",
        "skipped",
        "rewound",
        "two_owners",
        "zombie_commit",
        "not_owned",
        "delivered_twice",
        "needless_repeat",
        "retried_twice",
        "wrong_retries",
        "out_of_order",
        "overlapping",
    }


def test_what_was_done_behind_something_unfinished_may_come_again() -> None:
    history = without(killed(), "killed")
    failed = changed(history, "ended", {"ok": False}, id="x1")
    failed = [e for e in failed if e["event"] != "committed" or e["member"] != "m1"]
    failed = changed(failed, "acquired", {"offset": 0}, member="m2")
    assert judge([*failed, *run("m2", "x1", 0, 30, 31)], CONCURRENT).faults == []


def test_a_callback_that_ran_into_its_timeout_counts_as_failed() -> None:
    slow = changed(retried(), "ended", {"ok": True, "at": 19 * MS}, id="x1", at=12 * MS)
    slow = changed(slow, "sent", {"failures": 0}, id="x1")
    assert judge(slow, Rules(retries_max=2, timeout_s=0.005)).faults == []
    assert rules_broken(slow, CONCURRENT) == {"retried_twice", "wrong_retries"}


def test_a_batch_that_fails_takes_the_innocent_along() -> None:
    history = changed(retried(), "sent", {"failures": 0}, id="x1")
    assert judge(history, CONCURRENT).faults == []


@pytest.mark.parametrize("cause", ["fenced", "unsaved", "paused"])
def test_what_makes_a_repeat_legal(cause: str) -> None:
    history = [*without(killed(), "killed"), happened(cause, "m1", 16)]
    assert judge(history, CONCURRENT).faults == []


def test_a_broker_that_was_away_makes_a_repeat_legal() -> None:
    history = without(killed(), "killed")
    history.append({"event": "shaken", "broker": "b", "at": 15 * MS, "until": 20 * MS})
    assert judge(history, CONCURRENT).faults == []


def test_a_replaced_process_may_not_have_heard_where_its_coordinator_was_away() -> None:
    begins = [{**happened("began", name, at), "place": "p"} for name, at in (("m1", 1), ("m2", 20))]
    history = [*begins, *paused(), *run("m1", "x3", 2, 54, 55)]
    # m2's generation bears the mark of the one, nobody's that of the other.
    its, another = (next(b for b in map(str, range(9_999)) if mark_of(b) == n) for n in (2, 3))
    shaken = {"event": "shaken", "broker": its, "at": 15 * MS, "until": 60 * MS}
    assert judge([*history, shaken], IN_ORDER).faults == []
    for no_reason in ({"until": 53 * MS}, {"at": 31 * MS}, {"broker": another}):
        assert rules_broken([*history, {**shaken, **no_reason}], IN_ORDER) == {"overlapping"}
    others = changed(history, "began", {"place": "q"}, member="m2")
    assert rules_broken([*others, shaken], IN_ORDER) == {"overlapping"}
