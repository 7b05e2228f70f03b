"""How long a command waits for the cluster."""

import time
from types import SimpleNamespace

import pytest

import duemq
import duemq_cli
from duemq import ClientSettings
from duemq_cli import session
from duemq_cli.session import Session


@pytest.mark.parametrize(("passed_s", "left_s"), [(0.2, 2.8), (1.2, 1.8), (9.0, 1.5)])
def test_loading_the_program_is_a_part_of_the_three_seconds(
    monkeypatch: pytest.MonkeyPatch, passed_s: float, left_s: float
) -> None:
    began_s = time.monotonic()
    monkeypatch.setattr(duemq_cli, "began_s", began_s)
    clock = SimpleNamespace(monotonic=lambda: began_s + passed_s)
    monkeypatch.setattr(session, "time", clock)
    asked = Session()
    assert asked.client_settings.connect_timeout_s == pytest.approx(left_s)
    clock.monotonic = lambda: began_s + 3600  # it goes on, and connects again
    assert asked.client_settings.connect_timeout_s == pytest.approx(left_s)


def test_in_another_program_all_of_it_is_left() -> None:
    assert Session().client_settings.connect_timeout_s == session.CONNECT_TIMEOUT_S


def test_what_is_told_counts_instead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(duemq_cli, "began_s", time.monotonic() - 100)
    settings = Session(timeout_s=7).client_settings
    assert (settings.connect_timeout_s, settings.request_timeout_s) == (7, 7)
    assert settings.away_timeout_s > settings.request_timeout_s


def test_commands_wait_less_for_a_timer_shard_that_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[ClientSettings] = []
    monkeypatch.setattr(duemq, "Admin", lambda *_, settings: made.append(settings))
    Session(address="ns:1").admin()
    Session(address="ns:1", timeout_s=7).admin()
    assert [each.away_timeout_s < each.request_timeout_s for each in made] == [True, False]
