"""What came from a source, and what did not."""

from duemq_server.timer_service.far.numbering import SKIPS_MAX, Source
from duemq_server.timer_service.timers.log_entries import SourceId


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
