from dataclasses import dataclass
from importlib import import_module

import pytest

from duemq.errors import InvalidArgument
from duemq_server.serving import settings
from duemq_server.serving.settings import MemberSettings, setting


@dataclass(frozen=True, kw_only=True)
class Settings:
    """A test."""

    names: tuple[str, ...] = setting(("a",), "names")
    period: float = setting(10.0, "a period", unit="s", minimum=0.1, maximum=60)
    segment_bytes: int = setting(1 << 20, "a size", unit="bytes", minimum=4096)
    queues: int = setting(4, "a count", minimum=1, maximum=8)
    create: bool = setting(True, "a switch")
    mode: str = setting("sync", "a choice", choices=("sync", "async"))

    def __post_init__(self):
        settings.check(self)


def read(*argv, env=None):
    return settings.read(Settings, argv, env or {})


def test_flags_win_over_environment_over_file_over_default(tmp_path):
    file = tmp_path / "duemq.toml"
    file.write_text('queues = 2\nmode = "async"\nsegment-bytes = "64KiB"\nnames = ["x", "y"]\n')
    env = {"DUEMQ_CONFIG": str(file), "DUEMQ_QUEUES": "3", "DUEMQ_CREATE": "no"}
    found = read("--queues", "5", env=env)
    assert found == Settings(
        queues=5, create=False, mode="async", segment_bytes=65536, names=("x", "y")
    )
    assert read(env=env).queues == 3
    assert read("--config", str(file)).queues == 2
    assert read() == Settings()


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("10", 10), ("0.5", 0.5), ("500ms", 0.5), ("10s", 10), ("1m", 60), (" 2 s ", 2)],
)
def test_durations(text, seconds):
    assert read("--period", text).period == seconds


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4096", 4096),
        ("64KiB", 1 << 16),
        ("4MiB", 1 << 22),
        ("1.5GiB", 3 << 29),
        ("18.8GiB", 20_186_346_291),
        ("4096.9", 4096),
        ("8191.9999999999999999", 8191),
        ("18014398509481985B", (1 << 54) + 1),
    ],
)
def test_sizes(text, size):
    assert read("--segment-bytes", text).segment_bytes == size


def test_switches_and_lists():
    assert not read("--no-create").create
    assert read("--create", env={"DUEMQ_CREATE": "false"}).create
    assert read("--names", "a:1, b:2,").names == ("a:1", "b:2")


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--period", "soon"], "period is 'soon' (--period), must be a duration such as"),
        (["--period", "2h"], "period is 7200.0, must be 0.1 to 60"),
        (["--segment-bytes", "1"], "segment_bytes is 1, must be at least 4096"),
        (["--segment-bytes", "1KB"], "must be a size such as"),
        (["--segment-bytes", "9" * 400], "must be a size such as"),
        (["--segment-bytes", "4096." + "9" * 5000], "must be a size such as"),
        (["--segment-bytes", "0.3B"], "segment_bytes is 0, must be at least 4096"),
        (["--segment-bytes", "nan"], "must be a size such as"),
        (["--segment-bytes", "1e9"], "must be a size such as"),
        (["--segment-bytes=-0.3B"], "segment_bytes is -1, must be at least 4096"),
        (["--segment-bytes", "3.99KiB"], "segment_bytes is 4085, must be at least 4096"),
        (["--queues", "4.5"], "queues is '4.5' (--queues), must be a whole number"),
        (["--queues", "9"], "queues is 9, must be 1 to 8"),
        (["--mode", "fast"], "mode is 'fast', must be one of sync, async"),
    ],
)
def test_a_wrong_value_is_refused_by_name_value_and_limit(argv, said):
    with pytest.raises(InvalidArgument, match="must be") as caught:
        read(*argv)
    assert said in str(caught.value)
    assert caught.value.field
    assert caught.value.limit


def test_a_wrong_variable_is_named():
    with pytest.raises(InvalidArgument, match=r"DUEMQ_CREATE.*true or false"):
        read(env={"DUEMQ_CREATE": "perhaps"})


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("color = 1", "there is no setting 'color'"),
        ("queues = true", "must be a whole number"),
        ("queues = 1.5", "must be a whole number"),
        ("period = nan", "must be a duration such as"),
        ("period = inf", "must be a duration such as"),
        (f"period = {'9' * 400}", "must be a duration such as"),
        ("mode = 1", "must be text"),
        ("names = 1", "must be a list"),
        ("queues = ", "Invalid value"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path, content, said):
    file = tmp_path / "x.toml"
    file.write_text(content)
    with pytest.raises(InvalidArgument) as caught:
        read("--config", str(file))
    assert said in str(caught.value)
    assert str(file) in str(caught.value)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(InvalidArgument, match="No such file"):
        read("--config", str(tmp_path / "none"))


def test_load_ends_the_process_with_status_2(capsys):
    with pytest.raises(SystemExit) as ended:
        settings.load(Settings, ["--queues", "0"], {})
    assert ended.value.code == 2
    assert "queues is 0, must be 1 to 8" in capsys.readouterr().err


def test_help_names_every_setting(capsys):
    with pytest.raises(SystemExit):
        settings.load(Settings, ["--help"], {})
    shown = capsys.readouterr().out
    assert all(settings.flag(name) in shown for name in settings.names(Settings))


@pytest.mark.parametrize("service", ["nameserver", "broker", "timer_service"])
def test_help_names_the_command(service, capsys):
    kind = import_module(f"duemq_server.{service}.settings").Settings
    with pytest.raises(SystemExit):
        settings.load(kind, ["--help"], {})
    assert f"usage: duemq-{service.replace('_', '-')} " in capsys.readouterr().out


def member(**given):
    return MemberSettings(**{"name": "b-0", "data_dir": "d", **given})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("name", ""),
        ("name", "a b"),
        ("data_dir", ""),
        ("nameservers", ()),
        ("nameservers", ("host",)),
        ("listen", "host:70000"),
        ("listen", "::1:80"),
        ("listen", "[localhost]:80"),
        ("listen", "[::1:80"),
        ("advertise", "host:0"),
        # A port too many, as somebody has put it together.
        ("advertise", "[host:9870]:9870"),
        # Others would connect to themselves.
        ("advertise", "0.0.0.0:9870"),
        ("advertise", "[::]:9870"),
        ("metrics_listen", "9880"),
        ("heartbeat_period", 0),
        ("tracing", "yes"),
    ],
)
def test_a_members_settings_are_checked(field, value):
    with pytest.raises(InvalidArgument) as caught:
        member(**{field: value})
    assert caught.value.field == field


def test_addresses():
    assert settings.check_address("listen", "[::1]:80") == ("::1", 80)
    assert settings.check_address("listen", "[fe80::1%eth0]:80") == ("fe80::1%eth0", 80)
    assert member(listen="0.0.0.0:0").listen == "0.0.0.0:0"
