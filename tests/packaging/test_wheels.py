"""What the wheels of the five distributions hold and say."""

import pytest
from packaging.requirements import Requirement

from tests.packaging.installing import PROJECTS, ROOT, Wheel

# Seen here, so that it does not creep; a new face of the client (timers under keys, schedules,
# fire, holds, bulk changes; the twin's schedules; TLS; spans of lists by column) is worth some, and
# so is what keeps a client alive that is forked, interrupted or closed at a bad moment.
CLIENT_BYTES_MAX = 372_700
CLIENT_NEEDS = {"grpcio", "opentelemetry-api", "protobuf", "tenacity"}


def needs(wheel: Wheel) -> set[str]:
    """Names of what is required without any extra."""
    requirements = map(Requirement, wheel.requirements())
    return {each.name for each in requirements if "extra" not in str(each.marker)}


def test_all_have_one_version(wheels: dict[str, Wheel]) -> None:
    (version,) = {wheel.metadata()["Version"] for wheel in wheels.values()}
    assert all(f"-{version}-" in wheel.path.name for wheel in wheels.values())


@pytest.mark.parametrize("name", PROJECTS)
def test_a_wheel_holds_its_packages_and_nothing_else(name: str, wheels: dict[str, Wheel]) -> None:
    tops = {file.split("/")[0] for file in wheels[name].files()}
    assert {top for top in tops if not top.endswith(".dist-info")} == PROJECTS[name][1]


@pytest.mark.parametrize("name", PROJECTS)
def test_a_wheel_says_its_licence_and_has_a_readme(name: str, wheels: dict[str, Wheel]) -> None:
    metadata = wheels[name].metadata()
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata.get_all("License-File") == ["LICENSE"]
    assert wheels[name].read("licenses/LICENSE") == (ROOT / "LICENSE").read_text()
    assert metadata.get_payload().startswith("# ")
    assert metadata.get_all("Classifier")


def test_the_client_is_small_and_typed(wheels: dict[str, Wheel]) -> None:
    assert wheels["duemq"].path.stat().st_size <= CLIENT_BYTES_MAX
    assert "duemq/py.typed" in wheels["duemq"].files()
    # Types of the generated messages are for work on DueMQ itself: no public name has them.
    assert not {file for file in wheels["duemq"].files() if file.endswith(".pyi")}
    assert needs(wheels["duemq"]) == CLIENT_NEEDS
    extra = 'duemq-recurring>=0.1; extra == "testing"'
    assert extra in wheels["duemq"].requirements()


def test_none_but_the_command_line_needs_click(wheels: dict[str, Wheel]) -> None:
    assert {name for name in PROJECTS if needs(wheels[name]) & {"click", "rich"}} == {"duemq-cli"}


def test_what_is_no_module_is_packed(wheels: dict[str, Wheel]) -> None:
    assert {file for file in wheels["duemq-server"].files() if file.endswith(".csv")}
    analytics = wheels["duemq-analytics"].files()
    assert {"duemq_analytics/log4j2.properties", "duemq_analytics/report.html"} <= analytics
