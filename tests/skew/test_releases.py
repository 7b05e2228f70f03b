from __future__ import annotations

from importlib import metadata
from pathlib import Path

import pytest

from tests.skew.releases import NotHere, check_out, differing


def test_a_revision_that_the_history_lacks_is_named_with_what_helps(tmp_path: Path) -> None:
    with pytest.raises(NotHere, match=r"no revision 0123abcd.*--unshallow.*FROM=") as error:
        check_out("0123abcd", tmp_path)
    assert "shallow clone" in str(error.value)


def test_packages_that_are_not_installed_in_the_same_version_are_named() -> None:
    here = metadata.version("grpcio")
    pins = f"grpcio=={here} \\\n    --hash=sha256:00\nuvloop==0.0.1 \\\nno-such==1.0\n"
    assert differing(pins) == [
        f"uvloop 0.0.1 (here: {metadata.version('uvloop')})",
        "no-such 1.0 (here: none)",
    ]
