"""What the demo shows while it runs: a live table on a terminal, else a line now and then."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.table import Table

REFRESHES_PER_S = 4
# Off a terminal.
LINE_EVERY_S = 5.0


@dataclass(frozen=True)
class Status:
    """A moment of the day."""

    clock: str
    elapsed_s: float
    accepted: int
    pending: int
    cancelled: int
    delivered: Mapping[str, int]
    lateness: Mapping[str, float]
    note: str


class Screen:
    """Shows statuses; a context manager."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, refresh_per_second=REFRESHES_PER_S, transient=False)
        self._next_line_s = 0.0
        self._last_note = ""

    def __enter__(self) -> Screen:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._console.is_terminal:
            self._live.stop()

    def show(self, status: Status) -> None:
        """Shows the moment."""
        if self._console.is_terminal:
            self._live.update(_table(status))
        elif status.elapsed_s >= self._next_line_s or status.note != self._last_note:
            self._next_line_s = status.elapsed_s + LINE_EVERY_S
            self._last_note = status.note
            self._console.print(_line(status), soft_wrap=True)


def _table(status: Status) -> Table:
    table = Table(title=f"New York departures, 10 July 2013, {status.clock}", title_justify="left")
    for column in ("accepted", "pending", "cancelled", *status.delivered, "lateness p50", "p99"):
        table.add_column(column, justify="right")
    table.add_row(
        *(f"{n:,}" for n in (status.accepted, status.pending, status.cancelled)),
        *(f"{n:,}" for n in status.delivered.values()),
        _ms(status.lateness.get("p50_ms")),
        _ms(status.lateness.get("p99_ms")),
    )
    table.caption = status.note
    return table


def _line(status: Status) -> str:
    delivered = "  ".join(f"{group} {n:,}" for group, n in status.delivered.items())
    lateness = (
        f"lateness p50 {_ms(status.lateness.get('p50_ms'))} "
        f"p99 {_ms(status.lateness.get('p99_ms'))}"
    )
    return (
        f"{status.clock}  pending {status.pending:,}  cancelled {status.cancelled:,}  "
        f"{delivered}  {lateness}  {status.note}"
    )


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f} ms"
