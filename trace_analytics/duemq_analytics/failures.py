"""What went wrong, in one line."""

from __future__ import annotations

import re

_JAVA_CAUSE = re.compile(r"(?:: |Caused by: )(.+)")
"""A line of a Java stack that says what was thrown."""

_SPARK_ERROR = re.compile(r"\[[A-Z][A-Z0-9_.]+\] .+")
"""Spark's own words, after its error class: they name files and columns."""

_TRACEBACK = "Traceback (most recent call last):"
_RAISED = re.compile(rf"{re.escape(_TRACEBACK)}\n(?:[ \t].*\n)+(\S.*)")
"""What a Python worker, or code of a micro-batch, raised: it comes after the lines of code."""


def cause(error: object) -> str:
    """What it was, on one line, out of a hundred: what the reader itself said in a worker, or what
    Spark says, with the innermost cause, or what else Python raised, or the first line.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = [line for line in lines if line.startswith("duemq.errors.")]
    if told:
        return told[-1].partition(": ")[2]
    causes = [found[1] for line in lines if (found := _JAVA_CAUSE.match(line))]
    if not causes or causes[-1].endswith(_TRACEBACK):
        raised = _RAISED.findall(str(error))
        return raised[-1] if raised else one_line(error) or "Spark failed"
    said = next((found[0] for cause in causes if (found := _SPARK_ERROR.search(cause))), "")
    return f"{said} ({causes[-1]})" if said and said not in causes[-1] else causes[-1]


def one_line(error: object) -> str:
    """The first line that says something."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "")
