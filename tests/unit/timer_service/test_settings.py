import re
from pathlib import Path

from duemq_server.serving import settings as rpc_settings
from duemq_server.timer_service.settings import Settings
from duemq_server.timer_service.timers.limits import Limits

ARGUMENTS = ("--name", "t1", "--data-dir", "/data")
README = Path(__file__).parents[3] / "timer_service" / "README.md"


def test_limits_follow_the_settings() -> None:
    given = {
        "near-window": "5s",
        "near-rows-max": "20000",
        "near-bytes-max": "3MiB",
        "memtable-rows-max": "128",
        "memtable-bytes-max": "1MiB",
        "free-bytes-min": "7MiB",
        "cancelled-max": "2000",
        "schedules-max": "3",
        "schedule-bytes-max": "2MiB",
        "cancel-memory": "8s",
        "checkpoint-interval": "9s",
        "checkpoint-bytes": "5MiB",
    }
    flags = (part for name, value in given.items() for part in (f"--{name}", value))
    settings = rpc_settings.read(Settings, (*ARGUMENTS, *flags), {})

    assert settings.limits() == Limits(
        near_window_ms=5_000,
        near_rows_max=20_000,
        near_bytes_max=3 << 20,
        memtable_rows_max=128,
        memtable_bytes_max=1 << 20,
        free_bytes_min=7 << 20,
        tombstones_max=2_000,
        schedules_max=3,
        schedule_bytes_max=2 << 20,
        tombstone_keep_ms=8_000,
        checkpoint_interval_ms=9_000,
        checkpoint_log_bytes=5 << 20,
    )


def test_every_setting_is_in_the_readme() -> None:
    own = set(rpc_settings.names(Settings)) - set(rpc_settings.names(rpc_settings.MemberSettings))
    described = set(re.findall(r"`([a-z_]+)`", README.read_text(encoding="utf-8")))

    assert own <= described
