"""An image holds the versions that are tested."""

from pathlib import Path

import pytest

REQUIREMENTS = Path(__file__).parents[2] / "requirements"


def pins(name: str) -> dict[str, str]:
    """What a file pins, by requirement (`name==version`), with the hashes it allows."""
    text = (REQUIREMENTS / name).read_text().replace("\\\n", " ")
    lines = [line.split() for line in text.splitlines() if line and line.lstrip()[0] != "#"]
    return {line[0]: " ".join(sorted(line[1:])) for line in lines}


@pytest.mark.parametrize("image", ["server.txt", "traces.txt"])
def test_an_image_is_made_of_what_the_tests_run_with(image: str) -> None:
    held, tested = pins(image), pins("dev.txt")
    assert held
    assert {each: hashes for each, hashes in held.items() if tested.get(each) != hashes} == {}
