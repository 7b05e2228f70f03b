"""Pages of what is pending, wherever it lies."""

from __future__ import annotations

import pytest

from duemq_server.storage.errors import CorruptFile
from duemq_server.timer_service.timers.log_entries import Cancelled
from duemq_server.timer_service.views import listing
from duemq_server.timer_service.views.finding import HandleFinder
from duemq_server.timer_service.views.listing import Page, PageQuery
from tests.property.timer_world import DATA, SOURCE, Listing, World, message_id

DAY_MS = 86_400_000
END_MS = 1 << 60


def world_of_everything() -> World:
    """Near, in the memtable, in many blocks; many due in one millisecond."""
    world = World()
    for n in range(8):
        world.broker.accept([world.now_ms + 5_000 + n % 2] * 6, 10, "any")
        world.broker.accept([world.now_ms + DAY_MS + n % 3] * 10, 10, "any")
        world.broker.accept([world.now_ms + DAY_MS + n % 3] * 5, 10, "keyed")
        world.ingest(3)
        world.housekeep()
    assert world.scheduler.segments.blocks()
    return world


def test_pages_fit_together() -> None:
    world = world_of_everything()
    for limit in (1, 7, 40, 1_000):
        for every in (1, 5):
            pages = Listing(world, "any", limit, every)
            while not pages.over:
                pages.read()
            assert len(pages.seen) == len([n for n in listed_of(world) if n % every == 0])


def listed_of(world: World) -> list[int]:
    return [each.offset for each in world.pending() if each.topic == "any"]


def page(world: World, wanted: PageQuery) -> Page[int]:
    made = Page(world.scheduler, wanted, message_id, wants_all=True)
    made.run()
    return made


def test_a_page_has_what_is_due_in_between() -> None:
    world = world_of_everything()
    from_ms, to_ms = world.now_ms + 5_001, world.now_ms + DAY_MS + 1
    found = page(world, PageQuery("any", from_ms, to_ms, 1_000))
    expected = [each for each in world.pending() if each.topic == "any"]
    assert [each.made for each in found.listed] == [
        each.offset for each in expected if from_ms <= each.due_ms < to_ms
    ]
    assert found.next is None


def test_a_timer_cancelled_while_its_page_is_read_is_not_on_it() -> None:
    world = world_of_everything()
    made = Page(world.scheduler, PageQuery("any", 0, END_MS, 1_000), message_id, wants_all=True)
    gone = listed_of(world)[-1]
    assert world.cancel(gone) == "CANCELLED"
    made.run()
    assert gone not in [each.made for each in made.still_pending(world.scheduler)]


@pytest.mark.parametrize("bound", ["BLOCKS_MAX", "BYTES_MAX", "SCANNED_MAX"])
def test_what_a_page_reads_is_bounded_and_the_next_one_goes_on(
    bound: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = world_of_everything()
    expected = listed_of(world)
    monkeypatch.setattr(listing, bound, 1)
    found: list[int] = []
    pages, after = 0, None
    while after is not None or not pages:
        made = Page(
            world.scheduler, PageQuery("any", 0, END_MS, 3, after), message_id, wants_all=False
        )
        made.run()
        found += [each.made for each in made.listed]
        pages, after = pages + 1, made.next
    assert found == expected
    assert pages > 1


def test_damage_is_said() -> None:
    world = world_of_everything()
    block = min(world.scheduler.segments.blocks(), key=lambda each: each.next_due_ms)
    path = f"{DATA}/segments/{block.file}"
    file = world.disk.open(path)
    at = block.position + 100
    [byte] = bytes(file.pread(1, at))
    file.pwritev([bytes([byte ^ 1])], at)
    with pytest.raises(CorruptFile, match=block.file):
        page(world, PageQuery("any", 0, END_MS, 1_000))


def test_many_handles_are_found_at_once() -> None:
    world = world_of_everything()
    pending = {each.offset for each in world.pending()}
    offsets = range(len(world.broker.due_ms))
    handles = [Cancelled(SOURCE, offset, world.broker.due_ms[offset]) for offset in offsets]
    finding = HandleFinder(world.scheduler, [*handles, handles[0]._replace(due_ms=1)])
    while not finding.advance(world.now_ms):
        query = finding.query()
        look_up = world.look_up([query])
        look_up.run()
        world.scheduler.segments.looked_up(look_up)
        finding.answered(query)
    assert {each.offset for each in finding.located} == pending == set(offsets)
    assert finding.outcomes() == ["PENDING"] * len(handles) + ["UNKNOWN"]
    assert world.scheduler.ledger.cancelled == 0
