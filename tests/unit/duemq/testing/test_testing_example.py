"""The README's examples of tests with `duemq.testing`: their tests are run here."""

import importlib.util
from pathlib import Path

import pytest

SDK = Path(__file__).parents[4] / "sdk"
EXAMPLES = sorted((SDK / "examples" / "testing").glob("test_*.py"))

for _path in EXAMPLES:
    _spec = importlib.util.spec_from_file_location(_path.stem, _path)
    _example = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(_example)
    globals().update({name: value for name, value in vars(_example).items() if name[0] != "_"})


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_it_stands_in_the_readme(example: Path):
    assert example.read_text().strip() in (SDK / "README.md").read_text()
