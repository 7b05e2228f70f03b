"""What Spark keeps of a landing job in LAKE/_checkpoint, as far as a lake has to know it."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

from duemq_analytics.lake.commits import sync

CHECKPOINT = "_checkpoint"


def make_durable(checkpoint: Path, number: int) -> None:
    """That a micro-batch was planned, and the one before is done: Spark leaves it to the system.

    Before its commit in the lake, so that after a power failure nobody plans it otherwise.
    """
    files = {"": ["metadata"], "offsets": [str(number)], "commits": [str(number - 1)]}
    for folder, names in files.items():
        for name in names:
            for path in (checkpoint / folder / name, checkpoint / folder / f".{name}.crc"):
                if path.exists():
                    sync(path)
        if (checkpoint / folder).is_dir():
            sync(checkpoint / folder)


def drop_torn(checkpoint: Path) -> None:
    """Of the last micro-batch, what a power failure has left empty, or zeros: no job would start.

    What was not planned or not done durably is planned or done again.  A checkpoint that does not
    say of which query it is counts as lost: a new one begins where the lake's commits end.
    What Spark has begun to write goes, too: each kill or full disk may leave some for good.
    """
    metadata = checkpoint / "metadata"
    if metadata.exists() and _is_torn(metadata):
        shutil.rmtree(checkpoint)
        return
    for begun in checkpoint.rglob(".*.tmp*"):
        begun.unlink()
    for folder in ("offsets", "commits"):
        found = [path for path in (checkpoint / folder).glob("*") if path.name.isdecimal()]
        for path in sorted(found, key=lambda path: int(path.name))[-1:]:
            if _is_torn(path):
                path.unlink()
                (path.parent / f".{path.name}.crc").unlink(missing_ok=True)


def _is_torn(path: Path) -> bool:
    """Of what had its length and no bytes yet, some file systems make zeros."""
    return not path.read_bytes().strip(b"\0")


def any_done(checkpoint: Path) -> bool:
    """Whether a micro-batch is done: its commit in the lake came before."""
    return any(path.name.isdecimal() for path in (checkpoint / "commits").glob("*"))


def plan_of(checkpoint: Path, number: int) -> str:
    """Names the offsets of a micro-batch, which Spark writes down before it runs; "": not found."""
    try:
        return hashlib.sha256((checkpoint / "offsets" / str(number)).read_bytes()).hexdigest()
    except FileNotFoundError:
        return ""


def topic_ids_of(checkpoint: Path, number: int) -> dict[str, int]:
    """Broker → of which topic its offsets are, of a micro-batch that was planned; {}: not told.

    Its one source's offsets are the last line of what Spark writes down: `stream_offsets`.
    """
    try:
        text = (checkpoint / "offsets" / str(number)).read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}
    found = json.loads(text.splitlines()[-1])
    return {name: each["topic_id"] for name, each in found.items() if isinstance(each, dict)}


def query_of(checkpoint: Path) -> str:
    """Names a checkpoint's batches: another checkpoint counts them from 0 again.

    Raises FileNotFoundError; ValueError if a power failure has left it empty.
    """
    metadata = json.loads((checkpoint / "metadata").read_text(encoding="utf-8"))
    return str(metadata["id"])[:8]
