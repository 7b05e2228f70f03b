"""The command line of the benchmarks."""

from __future__ import annotations

from duemq_server.bench.commands import messages, services, timers
from duemq_server.bench.commands.measured import bench

__all__ = ["bench", "messages", "services", "timers"]  # each adds its commands to `bench`
