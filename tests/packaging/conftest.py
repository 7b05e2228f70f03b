"""The five wheels, built once, and environments in which some of them are installed."""

from collections.abc import Callable

import pytest

from tests.packaging.installing import PROJECTS, Environment, Wheel, build, install

# Building and installing take long where the machine is busy.
TIMEOUT_S = 300


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/packaging/" in item.path.as_posix():
            item.add_marker(pytest.mark.timeout(TIMEOUT_S))


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Wheel]:
    """By the distribution's name."""
    return {name: build(name, tmp_path_factory.mktemp(name)) for name in PROJECTS}


@pytest.fixture(scope="session")
def installed(
    wheels: dict[str, Wheel], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., Environment]:
    """`installed("duemq-cli")`: an environment that holds it and what it requires; made once."""
    made: dict[tuple[str, ...], Environment] = {}

    def environment(*names: str) -> Environment:
        if names not in made:
            made[names] = install(names, wheels, tmp_path_factory.mktemp("venv"))
        return made[names]

    return environment
