import time

import pytest

from duemq.errors import InvalidArgument, Overloaded, Unavailable
from duemq.transport import retrying
from duemq.transport.retrying import Backoff


def test_waits_grow_within_their_bounds_and_begin_anew():
    backoff = Backoff(0.1, 2.0)
    waits = [backoff.next_s() for _ in range(50)]
    assert all(0.1 <= wait <= 2.0 for wait in waits)
    assert waits[0] <= 0.2
    assert backoff.attempts == 50
    backoff.reset()
    assert backoff.attempts == 0
    assert backoff.next_s() <= 0.2


def test_a_long_outage_does_not_overflow():
    backoff = Backoff(0.1, 2.0)
    backoff.attempts = 10_000
    assert backoff.next_s() <= 2.0


def test_what_may_be_repeated_is_until_it_succeeds():
    answers = [Unavailable("gone"), Overloaded("full"), 7]

    def attempt():
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    assert retrying.until_blocking(time.monotonic() + 60, attempt) == 7
    assert answers == []


@pytest.mark.parametrize("error", [InvalidArgument("no"), ValueError("no")])
def test_what_fails_for_good_is_raised_at_once(error):
    attempts = []

    def attempt():
        attempts.append(1)
        raise error

    with pytest.raises(type(error)):
        retrying.until_blocking(time.monotonic() + 60, attempt)
    assert len(attempts) == 1


def test_there_is_one_attempt_however_late_it_is():
    attempts = []

    def attempt():
        attempts.append(1)
        raise Unavailable("gone")

    with pytest.raises(Unavailable, match="gone"):
        retrying.until_blocking(time.monotonic() - 1, attempt)
    assert len(attempts) == 1


@pytest.mark.parametrize("failures", [0, 1, 3])
async def test_each_attempt_is_made_once_until_one_succeeds(failures: int):
    answers = [Unavailable("gone") for _ in range(failures)] + [7]
    made = []

    async def attempt(left_s: float):
        made.append(left_s)
        answer = answers[len(made) - 1]
        if isinstance(answer, Exception):
            raise answer
        return answer

    assert await retrying.until(time.monotonic() + 60, attempt) == 7
    assert len(made) == failures + 1
    assert made == sorted(made, reverse=True)


@pytest.mark.parametrize(
    ("error", "left_s"), [(InvalidArgument("no"), 60), (Unavailable("gone"), 0)]
)
async def test_the_first_attempt_may_be_the_last(error: Exception, left_s: float):
    made = []

    async def attempt(left_s: float):
        made.append(left_s)
        raise error

    with pytest.raises(type(error)) as raised:
        await retrying.until(time.monotonic() + left_s, attempt)
    assert raised.value is error
    assert len(made) == 1


@pytest.mark.parametrize("field", ["timer_queue", "timer_shard", "offset"])
async def test_only_what_is_known_to_be_away_is_given_up_sooner(field):
    attempts = []

    async def attempt(left_s):
        attempts.append(left_s)
        if len(attempts) < 3:
            raise Unavailable("gone", field=field)
        return 7

    asked = retrying.until(time.monotonic() + 60, attempt, away_s=0)
    if field == "offset":
        assert await asked == 7
    else:
        with pytest.raises(Unavailable, match="gone"):
            await asked
        assert len(attempts) == 1
        assert await retrying.until(time.monotonic() + 60, attempt, away_s=60) == 7
