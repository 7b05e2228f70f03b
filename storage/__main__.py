"""`duemq-storage dump|check|cut|set-aside`: look into files, verify them, accept a loss.

Exit codes: 0 sound, 1 damage found, 2 wrong use, or not all was looked at.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from duemq_server.storage.dirlock import LOCK_NAME, DirLock
from duemq_server.storage.disk import RealDisk
from duemq_server.storage.errors import StorageError
from duemq_server.storage.replicas import is_replicas
from duemq_server.storage.tools.check import check
from duemq_server.storage.tools.cut import cut
from duemq_server.storage.tools.dump import dump
from duemq_server.storage.tools.set_aside import set_aside

EXIT_SOUND, EXIT_DAMAGE, EXIT_USAGE = 0, 1, 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="duemq-storage", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    dump_command = commands.add_parser("dump", help="print what a file holds, a line an entry")
    dump_command.add_argument(
        "path",
        help="segment, .broken file, index file, key run, checkpoint, mark, or log directory",
    )
    check_command = commands.add_parser("check", help="verify every byte; exit code 1 on damage")
    check_command.add_argument("directory", help="data directory of a service, or of one log")
    cut_command = commands.add_parser("cut", help="end a log at a position and lose what follows")
    cut_command.add_argument("directory", help="the log's directory (not the data directory)")
    cut_command.add_argument("--at", type=int, required=True, metavar="POSITION")
    aside_command = commands.add_parser("set-aside", help="lose one damaged entry, and no other")
    aside_command.add_argument("directory", help="the log's directory (not the data directory)")
    aside_command.add_argument("--at", type=int, required=True, metavar="POSITION")
    aside_command.add_argument(
        "--last-copy", action="store_true", help="of a replica: no other one has the entry"
    )
    return parser


def _run_check(directory: str) -> int:
    damaged = 0
    for finding in check(directory, RealDisk()):
        damaged += finding.damage
        print(f"DAMAGE  {finding.text}" if finding.damage else f"ok      {finding.text}")
    print(f"{damaged} damaged" if damaged else "sound")
    return EXIT_DAMAGE if damaged else EXIT_SOUND


@contextmanager
def _locked(directory: str) -> Iterator[None]:
    with ExitStack() as locks:
        for owner in (directory, os.path.dirname(os.path.abspath(directory))):
            if os.path.exists(os.path.join(owner, LOCK_NAME)):
                locks.enter_context(DirLock(owner))
        yield


def _check_last_copy(directory: str) -> None:
    """Raises ValueError for a log that others hold too, and whole."""
    data_dir = os.path.dirname(os.path.abspath(directory))
    if is_replicas(data_dir):
        raise ValueError(
            f"{data_dir} is a replica's: empty it, and it gets everything from the one that leads."
            " What is given up in it is lost for all once it leads: --last-copy does that, for when"
            " no other replica has it, or there are none any more"
        )


def _run_set_aside(directory: str, position: int, *, last_copy: bool) -> int:
    if not last_copy:
        _check_last_copy(directory)
    with _locked(directory):
        path, end = set_aside(directory, position, RealDisk())
    print(f"kept aside: {path}")
    print(f"{directory} goes on at {end}; run `duemq-storage check` again")
    return EXIT_SOUND


def _run_cut(directory: str, position: int) -> int:
    with _locked(directory):
        for path in cut(directory, position, RealDisk()):
            print(f"kept aside: {path}")
    print(f"{directory} now ends at {position}")
    return EXIT_SOUND


def _run(arguments: argparse.Namespace) -> int:
    if arguments.command == "dump":
        for line in dump(arguments.path, RealDisk()):
            print(line)
        return EXIT_SOUND
    if arguments.command == "check":
        return _run_check(arguments.directory)
    if arguments.command == "set-aside":
        return _run_set_aside(arguments.directory, arguments.at, last_copy=arguments.last_copy)
    return _run_cut(arguments.directory, arguments.at)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; answers the exit code."""
    arguments = _parser().parse_args(argv)
    try:
        code = _run(arguments)
        sys.stdout.flush()
        return code
    except StorageError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_DAMAGE
    except BrokenPipeError:
        # Whoever read this has seen enough; the interpreter must not flush it at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_USAGE
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USAGE


if __name__ == "__main__":
    sys.exit(main())
