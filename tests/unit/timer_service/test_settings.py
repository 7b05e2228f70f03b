import re
from pathlib import Path

from duemq_server.serving import settings as rpc_settings
from duemq_server.timer_service.settings import Settings

ARGUMENTS = ("--name", "t1", "--data-dir", "/data")
README = Path(__file__).parents[3] / "timer_service" / "README.md"


def test_limits_follow_the_settings() -> None:
    settings = rpc_settings.read(
        Settings, (*ARGUMENTS, "--near-window", "5s", "--memtable-bytes-max", "1MiB"), {}
    )

    limits = settings.limits()
    assert (limits.near_window_ms, limits.memtable_bytes_max) == (5_000, 1 << 20)


def test_every_setting_is_in_the_readme() -> None:
    own = set(rpc_settings.names(Settings)) - set(rpc_settings.names(rpc_settings.MemberSettings))
    described = set(re.findall(r"`([a-z_]+)`", README.read_text(encoding="utf-8")))

    assert own <= described
