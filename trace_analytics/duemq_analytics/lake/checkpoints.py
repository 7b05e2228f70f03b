"""What Spark keeps of a landing job in LAKE/_checkpoint, as far as a lake has to know it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

CHECKPOINT = "_checkpoint"


def plan_of(checkpoint: Path, number: int) -> str:
    """Names the offsets of a micro-batch, which Spark writes down before it runs; "": not found."""
    try:
        return hashlib.sha256((checkpoint / "offsets" / str(number)).read_bytes()).hexdigest()
    except FileNotFoundError:
        return ""


def query_of(checkpoint: Path) -> str:
    """Names a checkpoint's batches: another checkpoint counts them from 0 again.

    Raises FileNotFoundError.
    """
    metadata = json.loads((checkpoint / "metadata").read_text(encoding="utf-8"))
    return str(metadata["id"])[:8]
