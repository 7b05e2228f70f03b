"""What came from a source, and what did not."""

from duemq_server.timer_service.far.numbering import LOOKED_AT_MIN, SKIPS_MAX, Numbering, Source
from duemq_server.timer_service.timers.log_entries import SourceId, TargetId


def test_what_was_skipped_did_not_come_however_much_came_since() -> None:
    source = Source(SourceId(7, 1), "b", next_offset=10, first_offset=5)
    source.skip_to(20)
    for offset in range(20, 20 + 2 * SKIPS_MAX):  # what follows skips nothing
        source.skip_to(offset)
        source.next_offset = offset + 1
    assert source.skipped == ((10, 20),)
    came = [offset for offset in range(30) if source.had(offset)]
    assert came == [*range(5, 10), *range(20, 30)]
    assert not source.had(source.next_offset)


def test_a_target_that_comes_back_has_its_number_unless_another_one_got_it() -> None:
    numbers = Numbering()
    a, b, c, d = (TargetId("b", name, 0) for name in "abcd")
    assert [numbers.number_target(each) for each in (a, b)] == [0, 1]
    for number in (0, 1):
        numbers.give_up_target(number)
    assert numbers.next_looked_at() == []
    assert numbers.number_target(a) == 0
    assert numbers.number_target(c) == 1
    assert (numbers.targets, numbers.renamed) == ([a, c], [1])
    assert [numbers.number_target(each) for each in (d, b, a)] == [2, 3, 0]
    assert numbers.targets == [a, c, d, b]


def test_all_targets_are_looked_at_in_turn() -> None:
    numbers = Numbering()
    assert numbers.next_looked_at() == []
    count = 2 * LOOKED_AT_MIN + 1
    for number in range(count):
        numbers.number_target(TargetId("b", "t", number))
    found = [numbers.next_looked_at() for _ in range(3)]
    assert [len(each) for each in found] == [LOOKED_AT_MIN] * 3
    assert {number for each in found for number in each} == set(range(count))
