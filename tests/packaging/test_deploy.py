"""What deploy/ holds is right as far as this machine can tell."""

import configparser
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

import duemq_server.broker.settings
import duemq_server.nameserver.settings
import duemq_server.timer_service.settings
from duemq_server.serving.settings import names, read, variable

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
ENVIRONMENTS = sorted((DEPLOY / "systemd").glob("*.env"))
SETTINGS = {
    "duemq-nameserver": duemq_server.nameserver.settings.Settings,
    "duemq-broker": duemq_server.broker.settings.Settings,
    "duemq-timer-service": duemq_server.timer_service.settings.Settings,
}
COMMANDS = {
    "nameserver": "duemq-nameserver",
    "broker-0": "duemq-broker",
    "timer-0": "duemq-timer-service",
}


class Unit(configparser.RawConfigParser):
    """Keys may come more than once."""

    def __init__(self, path: Path) -> None:
        super().__init__(strict=False, interpolation=None)
        self.optionxform = str  # type: ignore[assignment,method-assign]
        self.read(path)


def variables(text: str) -> dict[str, str]:
    """Of an environment file; what is commented out counts, too."""
    return dict(re.findall(r"^#?(DUEMQ_\w+)=(.*)$", text, re.MULTILINE))


def compose() -> dict:
    return yaml.safe_load((DEPLOY / "compose.yaml").read_text())


def test_there_is_a_unit_for_every_service() -> None:
    commands = {Unit(path)["Service"]["ExecStart"] for path in UNITS}
    assert commands == {f"/opt/duemq/bin/{command}" for command in SETTINGS}


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze here")
@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.stem)
def test_systemd_takes_the_unit(path: Path, tmp_path: Path) -> None:
    programs = tmp_path / "bin"  # a path without spaces, wherever this is
    programs.symlink_to(Path(sys.executable).parent)
    text = path.read_text().replace("/opt/duemq/bin", str(programs))
    copy = tmp_path / path.name.replace("@.", "@broker-0.")
    # The user and the group need not exist here.
    copy.write_text(re.sub(r"^(User|Group)=.*\n", "", text, flags=re.MULTILINE))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(copy)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    told = [line for line in done.stderr.splitlines() if "duemq" in line]
    assert (done.returncode, told) == (0, []), done.stderr


@pytest.mark.parametrize("path", UNITS, ids=lambda path: path.stem)
def test_a_unit_gives_up_what_it_does_not_need(path: Path) -> None:
    service = Unit(path)["Service"]
    assert service["User"] == "duemq"
    for key in ("NoNewPrivileges", "PrivateTmp", "PrivateDevices", "ProtectHome"):
        assert service[key] == "yes"
    assert service["ProtectSystem"] == "strict"
    assert service["CapabilityBoundingSet"] == ""


@pytest.mark.parametrize(("file", "command"), sorted(COMMANDS.items()))
def test_a_service_takes_what_its_environment_files_say(file: str, command: str) -> None:
    common = variables((DEPLOY / "systemd" / "duemq.env").read_text())
    own = variables((DEPLOY / "systemd" / f"{file}.env").read_text())
    kind = SETTINGS[command]
    assert set(own) <= {variable(name) for name in names(kind)}
    known_somewhere = {variable(name) for each in SETTINGS.values() for name in names(each)}
    assert set(common) <= known_somewhere
    named = {"DUEMQ_NAME": file, "DUEMQ_DATA_DIR": "/var/lib/duemq"}
    unit = {} if file == "nameserver" else named
    settings = read(kind, [], common | own | unit)
    assert settings.listen == own["DUEMQ_LISTEN"]


def services() -> Iterator[tuple[str, dict]]:
    for name, service in compose()["services"].items():
        if name != "volumes":
            yield name, service


def test_whoever_looks_right_after_the_start_waits_for_the_nameserver() -> None:
    text = (DEPLOY / "README.md").read_text()
    looks = re.findall(r"^    (.*\bduemq\b.* cluster show)", text, re.MULTILINE)
    ready_s = duemq_server.nameserver.settings.Settings().ready_after
    assert len(looks) == 2
    for each in looks:
        timeout = re.search(r" --timeout (\d+) ", each)
        assert timeout
        assert int(timeout[1]) >= ready_s + 5
    folder = {Path(Unit(unit)["Service"]["ExecStart"].split()[0]).parent for unit in UNITS}
    assert {Path(looks[0].split()[0]).parent} == folder


def test_compose_is_back_after_its_machine() -> None:
    """Docker starts a container anew with `on-failure` when it has failed, and not with itself."""
    assert {service["restart"] for _, service in services()} == {"unless-stopped"}


def test_compose_runs_services_that_take_their_settings() -> None:
    ports = []
    for name, service in services():
        (command,) = service["command"]
        given = service["environment"]
        assert set(given) <= {variable(each) for each in names(SETTINGS[command])}, name
        settings = read(SETTINGS[command], [], given)
        # What others are told is what is listened on, by the name of the service.
        port = settings.listen.rpartition(":")[2]
        assert settings.advertise == f"{name}:{port}"
        assert service["ports"] == [f"127.0.0.1:{port}:{port}"]
        ports.append(port)
    assert len(set(ports)) == len(ports)


def test_compose_keeps_each_ones_data_apart() -> None:
    mounted = {name: service["volumes"] for name, service in services() if "volumes" in service}
    assert mounted == {name: [f"{name}:/data"] for name in ("broker-0", "broker-1", "timer-0")}
    assert set(compose()["volumes"]) == set(mounted)


def test_prometheus_looks_where_the_pages_are() -> None:
    jobs = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())["scrape_configs"]
    targets = {
        job["job_name"]: set(job["static_configs"][0]["targets"])
        for job in jobs
        if "static_configs" in job
    }
    assert targets["duemq"] == {
        variables(path.read_text())["DUEMQ_METRICS_LISTEN"]
        for path in ENVIRONMENTS
        if path.stem != "duemq"
    }
    assert targets["duemq-compose"] == {
        f"{name}:{service['environment']['DUEMQ_METRICS_LISTEN'].rpartition(':')[2]}"
        for name, service in services()
    }
