from duemq.consumer.delivery.lease import Lease, since_boot

SESSION_S = 10.0


class Member:
    """A lease, its clock, and how often it was renewed."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.renewed = 0
        self.lease = Lease(SESSION_S, lambda: self.now_s)
        self.lease.on_renewed(self._count)

    def _count(self) -> None:
        self.renewed += 1

    def joined(self) -> "Member":
        self.lease.begin()
        self.lease.sent()
        self.lease.heard(acknowledgement=False)
        return self


def test_it_is_over_until_the_group_has_answered():
    member = Member()
    assert member.lease.over
    member.lease.begin()
    member.lease.sent()
    assert member.lease.over
    member.lease.heard(acknowledgement=False)
    assert not member.lease.over
    assert member.renewed == 1


def test_it_lasts_a_session_from_when_the_hello_was_sent_not_from_its_answer():
    member = Member()
    member.lease.begin()
    member.lease.sent()
    member.now_s += 4
    member.lease.heard(acknowledgement=False)
    member.now_s += 5.9
    assert not member.lease.over
    member.now_s += 0.1
    assert member.lease.over


def test_it_is_over_before_the_coordinator_s_session_is():
    """Else two members could begin a callback of one queue at a time."""
    lease = Lease.of_session(SESSION_S)
    lease.begin()
    lease.sent()
    sent_s = lease.clock()
    lease.heard(acknowledgement=False)
    assert lease.until_s < sent_s + 0.95 * SESSION_S


def test_an_acknowledgement_renews_it_from_when_its_own_heartbeat_was_sent():
    member = Member().joined()
    member.now_s = 103
    member.lease.sent()
    member.now_s = 105
    member.lease.sent()
    member.now_s = 109
    member.lease.heard(acknowledgement=True)
    assert member.lease.until_s == 113
    member.lease.heard(acknowledgement=True)
    assert member.lease.until_s == 115


def test_assignments_prove_nothing_about_heartbeats():
    member = Member().joined()
    member.now_s = 105
    member.lease.sent()
    member.lease.heard(acknowledgement=False)
    assert member.lease.until_s == 110
    assert member.renewed == 1


def test_an_acknowledgement_before_the_assignment_counts_for_its_heartbeat_only():
    member = Member()
    member.lease.begin()
    member.lease.sent()
    member.now_s = 101
    member.lease.sent()
    member.now_s = 102
    member.lease.heard(acknowledgement=True)
    assert member.lease.until_s == 111
    member.lease.heard(acknowledgement=False)
    assert member.lease.until_s == 111


def test_a_process_that_was_stopped_learns_nothing_from_old_answers():
    member = Member().joined()
    member.now_s = 103
    member.lease.sent()
    member.now_s = 200  # SIGSTOP, SIGCONT; the answer had been waiting in the socket
    member.lease.heard(acknowledgement=True)
    assert member.lease.over
    assert member.renewed == 1
    member.lease.sent()
    member.lease.heard(acknowledgement=True)
    assert not member.lease.over
    assert member.renewed == 2


def test_a_new_stream_forgets_what_the_old_one_did_not_answer():
    member = Member().joined()
    member.lease.sent()
    member.now_s = 108
    member.lease.begin()
    member.lease.heard(acknowledgement=True)  # nothing of ours
    assert member.lease.until_s == 110
    member.lease.sent()
    member.lease.heard(acknowledgement=False)
    assert member.lease.until_s == 118


def test_it_is_never_shortened():
    member = Member().joined()
    member.lease.sent()
    member.now_s = 101
    member.lease.begin()
    member.lease.sent()
    member.lease.heard(acknowledgement=False)
    member.lease.heard(acknowledgement=True)
    assert member.lease.until_s == 111


def test_who_shares_with_nobody_has_it_for_ever():
    assert not Lease.forever().over


def test_the_clock_goes_forward():
    assert since_boot() <= since_boot()
