"""What a benchmark says: its parameters first, then its figures, and whether it failed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import click

from duemq_cli.output import as_json
from duemq_cli.text import shown

# Figures that must be 0, and what is wrong otherwise.
FAULTS = {
    "lost": "messages were lost",
    "twice": "messages came twice",
    "early": "messages came before their due time",
    "disordered": "messages came out of order",
}


@dataclass
class Report:
    """One run of one benchmark."""

    bench: str
    parameters: dict[str, Any]
    figures: dict[str, Any] = field(default_factory=dict)

    def floor(self, msgs_per_s: float) -> None:
        """Enters the floor of `msgs_per_s`, and the ratio to it."""
        self.figures["floor_msgs_per_s"] = round(msgs_per_s)
        self.figures["floor_ratio"] = round(self.figures["msgs_per_s"] / msgs_per_s, 3)

    @property
    def faults(self) -> list[str]:
        """What makes the run a failure."""
        return [
            f"{self.figures[name]:,} {fault}"
            for name, fault in FAULTS.items()
            if self.figures.get(name)
        ]

    def as_dict(self) -> dict[str, Any]:
        """The object that `--json` prints."""
        return {"bench": self.bench, "parameters": self.parameters, "figures": self.figures}

    def print_parameters(self) -> None:
        """For people, before the run."""
        named = "  ".join(f"{name}={value}" for name, value in self.parameters.items())
        click.echo(f"{self.bench}: {named}")

    def print_figures(self) -> None:
        """For people, after the run."""
        width = max(len(name) for name in self.figures)
        for name, value in self.figures.items():
            click.echo(f"  {name:<{width}}  {_figure(value)}")

    def print_json(self) -> None:
        """For programs."""
        click.echo(as_json(self.as_dict()))


def _figure(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.3f}".rstrip("0").rstrip(".")
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, dict):
        return "  ".join(f"{name} {_figure(part)}" for name, part in value.items())
    return shown(value)
