"""What is said of timers that were held back."""

import pytest

from duemq.descriptions import HeldTimers, ResumePolicy
from duemq_cli.commands.timer.holding import _resumed


@pytest.mark.parametrize(
    ("found", "told"),
    [
        (HeldTimers(9, True, 4, False), "4 dropped so far, all others wait"),
        (HeldTimers(9, True, 4), "4 dropped; the others of 9 delayed messages go"),
        (HeldTimers(5, False, 4, False), "not at every timer shard; 4 dropped so far, others wait"),
        (HeldTimers(5, False), "not at every timer shard; 0 dropped"),
    ],
)
def test_who_asks_again_is_told_how_far_it_is_though_some_shards_are_done(
    found: HeldTimers, told: str
) -> None:
    assert told in _resumed(found, ResumePolicy.NEWEST, dry_run=False)
    for policy, dry_run in ((ResumePolicy.ALL, False), (ResumePolicy.NEWEST, True)):
        assert "dropped s" not in _resumed(found, policy, dry_run=dry_run)
