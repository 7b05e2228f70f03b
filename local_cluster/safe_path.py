"""Where a child process of Python imports from: what is installed, before all else.

`python -m` puts the current folder first on the path, and what PYTHONPATH names comes before what
is installed: in a folder with a file `grpc.py`, a child would run that.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Mapping


def environment(inherited: Mapping[str, str]) -> dict[str, str]:
    """`inherited`, such that a child, and its children, import what is installed first.

    The current folder and the script's are left out.  What PYTHONPATH names comes last.
    """
    safe = {**inherited, "PYTHONSAFEPATH": "1"}
    named = [entry for entry in safe.pop("PYTHONPATH", "").split(os.pathsep) if entry]
    if named:
        # A child puts PYTHONPATH before its own, which is ours from the standard library on.
        stdlib = sysconfig.get_path("stdlib")
        start = sys.path.index(stdlib) if stdlib in sys.path else 0
        safe["PYTHONPATH"] = os.pathsep.join([*sys.path[start:], *named])
    return safe
