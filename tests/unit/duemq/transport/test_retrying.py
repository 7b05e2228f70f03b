import time

import pytest
import tenacity

from duemq.errors import InvalidArgument, NotReady, Overloaded, Timeout, Unavailable
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


class TestTheErrorOfAWaitThatIsOver:
    @pytest.fixture(autouse=True)
    def three_attempts(self, monkeypatch):
        stop = tenacity.stop_after_attempt(3)
        monkeypatch.setattr(retrying, "stop_before_delay", lambda left_s: stop)
        monkeypatch.setattr(retrying, "wait_random_exponential", lambda **_: tenacity.wait_none())

    async def error_of(self, errors):
        errors = iter(errors)

        async def attempt(left_s):
            raise next(errors)

        with pytest.raises(Unavailable) as raised:
            await retrying.until(time.monotonic() + 60, attempt)
        return raised.value

    async def test_says_what_is_wrong_where_the_last_attempt_only_was_too_late(self):
        why = NotReady("groups are being read", field="group", value="g")
        error = await self.error_of([Unavailable("gone"), why, Timeout("cut off")])
        assert type(error) is Timeout  # the last attempt may have done what was asked
        assert error.__cause__ is why
        assert error.message.startswith("groups are being read (tried for ")
        assert error.message.endswith(" s; at last: cut off)")
        assert (error.field, error.value) == ("group", "g")

    async def test_is_the_last_one_where_that_says_more(self):
        last = Unavailable("gone")
        assert await self.error_of([Timeout("slow"), NotReady("not yet"), last]) is last

    async def test_is_a_timeout_where_nothing_else_is_known(self):
        last = Timeout("slow")
        assert await self.error_of([Timeout("slow"), Timeout("slow"), last]) is last

    def test_is_the_same_in_threads(self):
        errors = iter([Unavailable("gone"), Timeout("cut off"), Timeout("cut off")])

        def attempt():
            raise next(errors)

        with pytest.raises(Unavailable, match=r"^gone \(tried for .* s; at last: cut off\)$"):
            retrying.until_blocking(time.monotonic() + 60, attempt)


async def test_no_attempt_begins_that_would_be_cut_off_at_once(monkeypatch):
    monkeypatch.setattr(retrying, "wait_random_exponential", lambda **_: tenacity.wait_none())
    made = []

    async def attempt(left_s):
        made.append(left_s)
        raise Unavailable("gone")

    with pytest.raises(Unavailable, match=r"^gone$"):
        await retrying.until(time.monotonic() + retrying.ATTEMPT_S_MIN, attempt)
    assert len(made) == 1
