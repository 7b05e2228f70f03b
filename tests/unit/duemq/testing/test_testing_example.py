"""The README's example of tests with `duemq.testing`: its tests are run here."""

import importlib.util
from pathlib import Path

SDK = Path(__file__).parents[4] / "sdk"
EXAMPLE = SDK / "examples" / "testing" / "test_reminders.py"

_spec = importlib.util.spec_from_file_location("test_reminders", EXAMPLE)
_example = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_example)
globals().update({name: value for name, value in vars(_example).items() if name[0] != "_"})


def test_it_stands_in_the_readme():
    assert EXAMPLE.read_text().strip() in (SDK / "README.md").read_text()
