"""A number of seconds as an option's type."""

from __future__ import annotations

import math
from typing import Any

import click


class Seconds(click.FloatRange):
    """A FloatRange that takes numbers alone: `nan` and `inf` would wait for ever."""

    name = "seconds"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Fails as click's types do."""
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value!r} is no number of seconds.", param, ctx)
        return number
