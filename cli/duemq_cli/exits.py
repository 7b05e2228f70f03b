"""Exit codes of the command line, for scripts to rely on."""

from __future__ import annotations

import enum

from duemq import errors


class Exit(enum.IntEnum):
    """What the process ends with."""

    OK = 0
    # Something that was asked for was not done: a message was not sent, a benchmark lost one.
    FAILED = 1
    # The command line or a value in it is wrong, or what it names is not as it must be (a group
    # that has members); nothing was done.
    USAGE = 2
    # The cluster cannot be reached, or does not answer in time.
    UNAVAILABLE = 3
    # The topic, queue, group, schedule or instance does not exist.
    NOT_FOUND = 4
    # A broker is away: what was printed is what the others know.
    PARTIAL = 5
    INTERRUPTED = 130


_NOT_FOUND = (
    errors.TopicNotFound,
    errors.QueueNotFound,
    errors.GroupNotFound,
    errors.InstanceNotFound,
    errors.ScheduleNotFound,
)


def exit_of(error: errors.DuemqError) -> Exit:
    """The exit code that tells of `error`."""
    if isinstance(error, _NOT_FOUND):
        return Exit.NOT_FOUND
    if isinstance(error, errors.InvalidArgument | errors.TooLarge):
        return Exit.USAGE
    if isinstance(error, errors.PartialAnswer) and error.partial is not None:
        return Exit.PARTIAL
    if isinstance(error, errors.Unavailable):
        return Exit.UNAVAILABLE
    return Exit.FAILED
