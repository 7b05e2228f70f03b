"""Judges the recorded history of a consumer group under disturbance.  Pure.

A history is a list of events (JSON objects).  `at` and `sent_at` are CLOCK_MONOTONIC nanoseconds,
which all processes of one machine share.  A `queue` is [topic, broker, number] where the message
lies, so that of a retried message is one of %RETRY%<group>.  `member` names a process, not a place.

    by the driver
      sent         id, key, failures            failures: how often the callback shall fail
      acked        id
      began        member, place, at            place: the name that processes share, or null
      killed       member, at
      paused       member, at                   (SIGSTOP)
      shaken       broker, at, until            a broker killed or paused, and when it was back
      stored       id, queue, offset, attempt, source: [queue, offset] | null   the log, at the end
      progress     queue, offset, end           the group's offsets, at the end
    by the members
      assigned     member, generation, queues, at
      acquired     member, queue, generation, offset, settled, sent_at, at
      committed    member, queue, generation, offset, sent_at, at           the broker took it
      unsaved      member, queue, at            a commit was refused or not answered
      fenced       member, at                   somebody told the member that it was overtaken
      returned     member, queue, offset, dead_letter, duplicate, sent_at, at   a send-back's answer
      kept         member, queue, offset, at            a send-back was refused or not answered
      started      member, id, queue, offset, attempt, worker, looked_at, at     the callback begins
      ended        member, id, queue, offset, ok, at                        … and ends
      closed       member, at                   a clean leave, all saved

A *holding* is what one `acquired` begins: a queue in one member's hands under one generation.

What `judge` proves, each a list of faults when it does not hold:

    lost               what was acknowledged is in the log; every record of the log, those of
                       %RETRY% included, was processed or sent back; nothing is left over
    stored_twice       a message is stored once; nothing is stored that was not sent
    skipped            a commit covers only what its holding processed or sent back before
    rewound            no holding begins below an offset that was committed before
    two_owners         in one generation a queue is acquired by one member, and assigned to one
    zombie_commit      after a newer generation has acquired a queue, an older one commits nothing
    not_owned          nothing is delivered that was not acquired, was settled, or lies before it
    delivered_twice    a holding delivers a message once, and again only after its callback failed
    needless_repeat    a message that was processed comes again to another holding only within the
                       documented window (below)
    retried_twice      a send-back is stored once, as the deliveries of a message count on
    wrong_retries      a message that fails n times comes n times more, or is dead-lettered when the
                       policy's retries are used up; in place only after its broker kept it from
                       going back (not judged if it ran into the timeout or failed with others of
                       its batch)
    out_of_order       (ordered) a message starts after all earlier ones of its key are finished
    overlapping        (ordered) one message of a key at a time in a holding; a worker looks at its
                       lease before each callback, and not after a newer holding has the queue

**The documented window of duplicates.**  What a holding had processed and not committed may come
again
 - if it ended uncleanly: its member was killed, was paused, or was fenced (its session was over, so
   another took over), a commit could not be saved, or a broker was killed or paused meanwhile;
 - if it ended cleanly, behind a message that was not finished: one that failed and waits for its
   turn in place, or that no callback had begun.  A group's progress in a queue is one offset.

**What a process that was stopped, or got no processor, may still do.**  A worker looks at the lease
and then calls.  Between the two it may be stopped for any time.  So a callback may begin late, one
a worker, if the look lay before the loss (`looked_at`); and callbacks that ran when the session
ended may end late.  Their results are never committed.

**What a process may do that another one has replaced under its name.**  It is told so, and begins
nothing more, by the time that the other one has the queue.  Where the coordinator of one of them
was killed or paused meanwhile it may have lost the stream that it would have been told on: then it
may begin callbacks until that has settled.
"""

from __future__ import annotations

import bisect
import itertools
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from zlib import crc32

from duemq_server.broker.store.offsets import GENERATION_MARKS

Event = dict[str, Any]
Queue = tuple[str, str, int]
Place = tuple[Queue, int]

FAULTS_NAMED_MAX = 10
FOREVER = 1 << 62
RETRY_PREFIX = "%RETRY%"
DEAD_PREFIX = "%DLQ%"


@dataclass(frozen=True)
class Rules:
    """How the group was told to consume.

    ordered: None, "key" or "queue".  retries_max: of the group's policy (concurrent).
    in_order_max: deliveries in place before the dead letter (ordered).  timeout_s: a callback that
    runs for longer is taken for failed, whatever it does later (concurrent).
    """

    ordered: str | None = None
    retries_max: int = 16
    in_order_max: int = 16
    timeout_s: float = 900.0


@dataclass
class Verdict:
    """What the history proves; no faults: all of it.  Counts say how much there was to prove."""

    faults_by_rule: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    messages: int = 0
    deliveries: int = 0
    holdings: int = 0
    repeated: int = 0
    retried: int = 0
    dead_letters: int = 0

    @property
    def faults(self) -> list[str]:
        """Every fault in words, by rule."""
        return [
            f"{rule}: {len(faults)}: " + "; ".join(faults[:FAULTS_NAMED_MAX])
            for rule, faults in self.faults_by_rule.items()
        ]

    def summary(self) -> str:
        """One line for people."""
        return (
            f"{self.messages} messages, {self.deliveries} deliveries, {self.holdings} holdings, "
            f"{self.repeated} repeated, {self.retried} retries, {self.dead_letters} dead letters"
        )


@dataclass(eq=False)
class Run:
    """One call of the callback.  `end` is FOREVER if it did not end."""

    id: str
    place: Place
    attempt: int
    start: int
    holding: Holding | None
    worker: tuple[str, int]
    looked_at: int
    """When the worker saw the lease and the queue last, and began because of that."""
    end: int = FOREVER
    ok: bool = False


@dataclass(eq=False)
class Holding:
    """A queue in a member's hands."""

    member: str
    queue: Queue
    generation: int
    offset: int
    settled: frozenset[int]
    sent_at: int
    at: int
    over: int = FOREVER
    """When the same member acquired the queue anew."""
    runs: list[Run] = field(default_factory=list)
    done_at: list[int] = field(default_factory=lambda: [0])
    """By offset from `offset` on: when all before it had been dealt with; filled as needed."""

    def __str__(self) -> str:
        return f"{self.member} with {_named(self.queue)} in generation {self.generation}"


def judge(history: Iterable[Event], rules: Rules = Rules()) -> Verdict:
    """Judges a history against the rules above."""
    return _Judge(list(history), rules).verdict()


class _Judge:
    def __init__(self, history: list[Event], rules: Rules) -> None:
        self._rules = rules
        self._verdict = Verdict()
        self._events: dict[str, list[Event]] = defaultdict(list)
        for event in history:
            self._events[event["event"]].append(event)
        self._sent = {event["id"]: event for event in self._events["sent"]}
        self._places = {event["member"]: event.get("place") for event in self._events["began"]}
        self._stored: dict[Place, Event] = {_place(e): e for e in self._events["stored"]}
        self._children: dict[Place, list[Event]] = defaultdict(list)
        for event in self._events["stored"]:
            if event.get("source"):
                queue, offset = event["source"]
                self._children[_queue(queue), offset].append(event)
        self._holdings = self._read_holdings()
        self._runs = self._read_runs()
        self._runs_at: dict[Place, list[Run]] = defaultdict(list)
        for run in self._runs:
            self._runs_at[run.place].append(run)
        # By place: when the first send-back was answered.
        self._returned: dict[Place, int] = {}
        for event in self._events["returned"]:
            place = _place(event)
            self._returned[place] = min(self._returned.get(place, FOREVER), event["at"])
        # By place: when the first send-back failed.
        self._kept: dict[Place, int] = {}
        for event in self._events["kept"]:
            place = _place(event)
            self._kept[place] = min(self._kept.get(place, FOREVER), event["at"])

    def verdict(self) -> Verdict:
        self._check_log()
        self._check_finished()
        self._check_commits()
        self._check_owners()
        self._check_deliveries()
        self._check_repeats()
        self._check_retries()
        if self._rules.ordered:
            self._check_order()
            self._check_overlaps()
        verdict = self._verdict
        verdict.messages = len(self._sent)
        verdict.deliveries = len(self._runs)
        verdict.holdings = sum(map(len, self._holdings.values()))
        return verdict

    def _fault(self, rule: str, what: str) -> None:
        self._verdict.faults_by_rule[rule].append(what)

    # -- reading ------------------------------------------------------------------------------

    def _read_holdings(self) -> dict[tuple[str, Queue], list[Holding]]:
        found: dict[tuple[str, Queue], list[Holding]] = defaultdict(list)
        for e in sorted(self._events["acquired"], key=lambda e: e["at"]):
            holding = Holding(
                member=e["member"],
                queue=_queue(e["queue"]),
                generation=e["generation"],
                offset=e["offset"],
                settled=frozenset(e["settled"]),
                sent_at=e["sent_at"],
                at=e["at"],
            )
            before = found[holding.member, holding.queue]
            if before:
                before[-1].over = holding.at
            before.append(holding)
        return found

    def _read_runs(self) -> list[Run]:
        """Starts and ends, matched; each run also in its holding."""
        runs: list[Run] = []
        open_runs: dict[tuple[str, Place], list[Run]] = defaultdict(list)
        both = self._events["started"] + self._events["ended"]
        for e in sorted(both, key=lambda e: (e["at"], e["event"] == "ended")):
            place = _place(e)
            if e["event"] == "started":
                holding = self._holding_at(e["member"], place[0], e["at"])
                worker = e["member"], e["worker"]
                run = Run(e["id"], place, e["attempt"], e["at"], holding, worker, e["looked_at"])
                runs.append(run)
                open_runs[e["member"], place].append(run)
                if holding is not None:
                    holding.runs.append(run)
            elif open_runs[e["member"], place]:
                run = open_runs[e["member"], place].pop(0)
                run.end, run.ok = e["at"], e["ok"]
        return runs

    def _holding_at(self, member: str, queue: Queue, at: int) -> Holding | None:
        holdings = self._holdings.get((member, queue), [])
        index = bisect.bisect_right(holdings, at, key=lambda holding: holding.at)
        return holdings[index - 1] if index else None

    def _all_holdings(self) -> Iterator[Holding]:
        for holdings in self._holdings.values():
            yield from holdings

    # -- the rules ----------------------------------------------------------------------------

    def _check_log(self) -> None:
        first = Counter(e["id"] for e in self._events["stored"] if not e.get("source"))
        for event in self._events["acked"]:
            if not first[event["id"]]:
                self._fault("lost", f"{event['id']} was acknowledged and is not in the log")
        for id, count in first.items():
            if count > 1:
                self._fault("stored_twice", f"{id}: {count} times")
            if id not in self._sent:
                self._fault("stored_twice", f"{id} was never sent")

    def _check_finished(self) -> None:
        """Whatever lies in a queue that the group consumes was processed or sent back."""
        for place, event in self._stored.items():
            if place[0][0].startswith(DEAD_PREFIX) or self._children[place]:
                continue
            if not any(run.ok for run in self._runs_at[place]):
                self._fault("lost", f"{event['id']} at {_at(place)} was never processed")
        for event in self._events["progress"]:
            if event["offset"] != event["end"]:
                left = f"{event['offset']} of {event['end']}"
                self._fault("lost", f"{_named(_queue(event['queue']))} was left at {left}")

    def _check_commits(self) -> None:
        commits: dict[Queue, list[Event]] = defaultdict(list)
        for event in sorted(self._events["committed"], key=lambda e: e["at"]):
            commits[_queue(event["queue"])].append(event)
            self._check_covered(event)
        for holding in self._all_holdings():
            before = [e["offset"] for e in commits[holding.queue] if e["at"] < holding.sent_at]
            if before and max(before) > holding.offset:
                begun = f"{holding} began at {holding.offset}"
                self._fault("rewound", f"{begun}, {max(before)} was committed")
            for event in commits[holding.queue]:
                if event["sent_at"] > holding.at and event["generation"] < holding.generation:
                    late = f"{event['member']} in generation {event['generation']}"
                    self._fault("zombie_commit", f"{late} committed after {holding}")

    def _check_covered(self, commit: Event) -> None:
        """All below a commit had been dealt with when it was sent."""
        queue = _queue(commit["queue"])
        holding = next(
            (
                each
                for each in reversed(self._holdings.get((commit["member"], queue), []))
                if each.at <= commit["sent_at"] and each.generation == commit["generation"]
            ),
            None,
        )
        if holding is None:
            what = f"{commit['member']} committed {_named(queue)} without having acquired it"
            self._fault("skipped", what)
            return
        done_at = self._done_at(holding, commit["offset"])
        if done_at > commit["sent_at"]:
            what = f"{holding} committed {commit['offset']}"
            self._fault("skipped", f"{what} with something before it unfinished")

    def _done_at(self, holding: Holding, offset: int) -> int:
        """When the holding had dealt with all that lies before an offset."""
        known = holding.done_at
        if len(known) > offset - holding.offset:
            return known[max(offset - holding.offset, 0)]
        done = {run.place[1]: run.end for run in holding.runs if run.ok}
        for index in range(holding.offset + len(known) - 1, offset):
            if index in holding.settled:
                at = 0
            else:
                at = min(
                    done.get(index, FOREVER), self._returned.get((holding.queue, index), FOREVER)
                )
            known.append(max(known[-1], at))
        return known[-1]

    def _check_owners(self) -> None:
        owners: dict[tuple[Queue, int], set[str]] = defaultdict(set)
        for holding in self._all_holdings():
            owners[holding.queue, holding.generation].add(holding.member)
        assigned: dict[tuple[Queue, int], set[str]] = defaultdict(set)
        for event in self._events["assigned"]:
            for queue in event["queues"]:
                assigned[_queue(queue), event["generation"]].add(event["member"])
        for what, table in (("acquired by", owners), ("assigned to", assigned)):
            for (queue, generation), members in table.items():
                if len(members) > 1:
                    names = f"{what} {sorted(members)} in generation {generation}"
                    self._fault("two_owners", f"{_named(queue)} {names}")

    def _check_deliveries(self) -> None:
        for run in self._runs:
            holding = run.holding
            if holding is None:
                self._fault("not_owned", f"{run.id} at {_at(run.place)}: no member had acquired it")
            elif run.place[1] < holding.offset:
                self._fault("not_owned", f"{run.id}: {holding} began behind it, {holding.offset}")
            elif run.place[1] in holding.settled:
                self._fault("not_owned", f"{run.id} at {_at(run.place)} was settled for {holding}")
        for holding in self._all_holdings():
            last: dict[int, Run] = {}
            for run in holding.runs:
                before = last.get(run.place[1])
                if before is not None and (before.ok or before.end > run.start):
                    self._fault("delivered_twice", f"{run.id} to {holding}")
                last[run.place[1]] = run

    def _check_repeats(self) -> None:
        for place, runs in self._runs_at.items():
            holdings = {run.holding for run in runs}
            self._verdict.repeated += len(holdings) - 1
            for done in (run for run in runs if run.ok):
                again = next((r for r in runs if r.start > done.end), None)
                if again is None or again.holding is None or done.holding is None:
                    continue
                # A paused member may be the later one to process, and yet the older to hold.
                older, newer = sorted((done.holding, again.holding), key=lambda each: each.at)
                covered = self._done_at(older, place[1] + 1) <= newer.sent_at
                if older is not newer and covered and not self._ended_uncleanly(older, newer):
                    what = f"{done.id} at {_at(place)} was processed by {done.holding}"
                    self._fault("needless_repeat", f"{what} and again by {again.holding}")

    def _ended_uncleanly(self, holding: Holding, following: Holding) -> bool:
        """Whether the holding's uncommitted tail may come again."""
        begin, end = holding.at, following.at

        def during(kind: str, until: int = end) -> bool:
            return any(
                begin <= event["at"] <= until
                for event in self._events[kind]
                if event["member"] == holding.member
            )

        return (
            during("killed")
            or during("paused")
            or during("fenced", holding.over)  # it may learn of it later
            or during("unsaved", holding.over)
            or any(e["at"] <= end and e["until"] >= begin for e in self._events["shaken"])
        )

    def _check_retries(self) -> None:
        for place, children in self._children.items():
            parent = self._stored.get(place)
            if len(children) > 1:
                self._fault("retried_twice", f"{children[0]['id']} at {_at(place)}")
            for child in children:
                dead = child["queue"][0].startswith(DEAD_PREFIX)
                self._verdict.retried += not dead
                self._verdict.dead_letters += dead
                if parent is None:
                    self._fault("retried_twice", f"{child['id']}: no record at {_at(place)}")
                elif child["attempt"] <= parent["attempt"]:
                    self._fault("retried_twice", f"{child['id']}: attempts do not count on")
                elif not any(not run.ok or self._timed_out(run) for run in self._runs_at[place]):
                    self._fault("retried_twice", f"{child['id']} at {_at(place)} had not failed")
        unplanned = {run.id for run in self._runs if self._failed_beyond_its_plan(run)}
        copies: dict[str, list[Event]] = defaultdict(list)
        for event in self._events["stored"]:
            if event.get("source"):
                copies[event["id"]].append(event)
        first = {e["id"] for e in self._events["stored"] if not e.get("source")}
        in_place: Counter[str] = Counter()
        for place, event in self._stored.items():
            in_place[event["id"]] += self._called_again(place, event["attempt"])
        for id in sorted((first & self._sent.keys()) - unplanned):
            self._check_copies(id, self._sent[id]["failures"], copies[id], in_place[id])

    def _failed_beyond_its_plan(self, run: Run) -> bool:
        """By its timeout, or together with others of its batch."""
        planned = self._sent.get(run.id, {}).get("failures", 0)
        in_batch = not run.ok and run.end < FOREVER and run.attempt >= planned
        return not self._rules.ordered and (in_batch or self._timed_out(run))

    def _timed_out(self, run: Run) -> bool:
        limited = not self._rules.ordered
        return limited and run.end - run.start >= self._rules.timeout_s * 1e9

    def _called_again(self, place: Place, attempt: int) -> int:
        """How many of its retries a message had in place, as the broker did not take it back."""
        if children := self._children[place]:
            last = min(child["attempt"] for child in children) - 1
        else:
            last = min((run.attempt for run in self._runs_at[place] if run.ok), default=attempt)
        kept_at = self._kept.get(place, FOREVER)
        tries = {run.attempt for run in self._runs_at[place] if run.start > kept_at}
        return sum(attempt < each <= min(last, self._rules.retries_max) for each in tries)

    def _check_copies(self, id: str, failures: int, copies: list[Event], in_place: int) -> None:
        found_dead = sum(copy["queue"][0].startswith(DEAD_PREFIX) for copy in copies)
        found = len(copies) - found_dead
        if self._rules.ordered:  # in place, until the dead letter
            retries, dead = 0, int(failures >= self._rules.in_order_max)
        else:
            retries = min(failures, self._rules.retries_max) - in_place
            dead = int(failures > self._rules.retries_max)
        if (found, found_dead) != (retries, dead):
            wanted = f"{retries} retries and {dead} dead letters"
            self._fault("wrong_retries", f"{id}: {found} and {found_dead}, not {wanted}")

    # -- order --------------------------------------------------------------------------------

    def _lines(self) -> dict[tuple[Queue, str], list[int]]:
        """Offsets of what must be in order, per queue and key; in queue mode the key is empty."""
        lines: dict[tuple[Queue, str], list[int]] = defaultdict(list)
        for (queue, offset), event in sorted(self._stored.items()):
            if not event.get("source"):
                lines[queue, self._key(event["id"])].append(offset)
        return lines

    def _key(self, id: str) -> str:
        by_key = self._rules.ordered == "key" and id in self._sent
        return self._sent[id]["key"] if by_key else ""

    def _check_order(self) -> None:
        finished: dict[Place, int] = {}
        for place in self._stored:
            runs = self._runs_at[place]
            ends = [run.end for run in runs if run.ok]
            if self._children[place]:
                ends += [run.end for run in runs if not run.ok][-1:]
            finished[place] = min(ends, default=FOREVER)
        for (queue, key), offsets in self._lines().items():
            latest = 0
            for offset in offsets:
                place = (queue, offset)
                for run in self._runs_at[place]:
                    if run.start < latest:
                        what = f"{run.id} at {_at(place)} (key {key!r})"
                        self._fault("out_of_order", f"{what} began before one ahead of it ended")
                latest = max(latest, finished[place])

    def _check_overlaps(self) -> None:
        lines: dict[tuple[Holding, str], list[Run]] = defaultdict(list)
        for run in self._runs:
            if run.holding is not None and not run.place[0][0].startswith(RETRY_PREFIX):
                lines[run.holding, self._key(run.id)].append(run)
        for (holding, key), runs in lines.items():
            for before, run in itertools.pairwise(runs):
                if before.end > run.start:
                    self._fault("overlapping", f"key {key!r}: {before.id}, {run.id} to {holding}")
        by_queue: dict[Queue, list[Holding]] = defaultdict(list)
        for holding in self._all_holdings():
            by_queue[holding.queue].append(holding)
        for holding in self._all_holdings():
            newer = [h for h in by_queue[holding.queue] if h.generation > holding.generation]
            if not newer:
                continue
            taker = min(newer, key=lambda each: each.at)
            for run in holding.runs:
                if run.looked_at > taker.at and not self._is_untold(run, holding, taker):
                    ms = (run.looked_at - taker.at) / 1e6
                    what = f"{run.id} was allowed to begin"
                    self._fault("overlapping", f"{what} {ms:.1f} ms after {holding} lost it")
        self._check_looks()

    def _is_untold(self, run: Run, holding: Holding, taker: Holding) -> bool:
        """Another process has its name, and the coordinator of one of them was away."""
        place = self._places.get(holding.member)
        if place is None or place != self._places.get(taker.member):
            return False
        marks = {each.generation % GENERATION_MARKS for each in (holding, taker)}
        return any(
            mark_of(each["broker"]) in marks
            and each["at"] <= taker.at
            and run.looked_at <= each["until"]
            for each in self._events["shaken"]
        )

    def _check_looks(self) -> None:
        looks: dict[tuple[str, int], int] = {}
        for run in self._runs:
            if run.looked_at <= looks.get(run.worker, -1):
                self._fault("overlapping", f"{run.id} began without a look at the lease")
            looks[run.worker] = run.looked_at


def mark_of(broker: str) -> int:
    """That the generations bear which this broker makes as a coordinator."""
    return crc32(broker.encode()) % GENERATION_MARKS


def load(paths: Iterable[Path]) -> list[Event]:
    """Reads what members and the driver wrote, an event a line; a torn last line is left out."""
    events = []
    for path in paths:
        text = path.read_text(encoding="utf-8")
        events += [json.loads(line) for line in text.splitlines(keepends=True) if line[-1] == "\n"]
    return events


def _queue(queue: Iterable[Any]) -> Queue:
    topic, broker, number = queue
    return topic, broker, number


def _place(event: Event) -> Place:
    return _queue(event["queue"]), event["offset"]


def _named(queue: Queue) -> str:
    return "/".join(map(str, queue))


def _at(place: Place) -> str:
    return f"{_named(place[0])}@{place[1]}"
