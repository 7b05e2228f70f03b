"""A signal whose handler raises, at any line: as Ctrl-C that is caught, or a time limit."""

import linecache
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


class Interrupt(BaseException):
    """What the handler raises."""


def interrupted(
    call: Callable[[], object], at: int, within: Callable[[str], bool], latest: str = ""
) -> bool:
    """Whether it was, in front of the `at`-th line that it came to in files `within`.

    `latest`: a function of them at which it is interrupted if it was not before.
    """
    left = at

    def line(frame: FrameType, event: str, _: object) -> Any:
        nonlocal left
        text = linecache.getline(frame.f_code.co_filename, frame.f_lineno).split()[:1]
        # Python looks for signals after calls: not where a block begins or ends.
        left -= event == "line" and text not in (["with"], ["try:"])
        if not left or frame.f_code.co_name == latest:
            raise Interrupt
        return line

    before = sys.gettrace()
    sys.settrace(lambda frame, *_: line if within(frame.f_code.co_filename) else None)
    try:
        call()
    except Interrupt:
        return not left
    finally:
        sys.settrace(before)
    return False
