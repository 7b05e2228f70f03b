"""Settings of a nameserver."""

from dataclasses import dataclass

from duemq_server.serving.settings import ProcessSettings, setting


@dataclass(frozen=True, kw_only=True)
class Settings(ProcessSettings):
    """A DueMQ nameserver: tells clients which brokers serve which topics."""

    listen: str = setting("0.0.0.0:9876", "HOST:PORT to serve gRPC on; port 0: any free one")
    expiry: float = setting(
        30.0,
        "how long a report holds without another, where it does not say so itself",
        unit="s",
        minimum=0.1,
        maximum=3600,
    )
    ready_after: float = setting(
        10.0,
        "how long it answers NOT_READY after its start: a heartbeat period of the brokers",
        unit="s",
        minimum=0,
        maximum=3600,
    )
    lost_kept: float = setting(
        3600.0,
        "how long a broker or timer shard that vanished is listed as lost",
        unit="s",
        minimum=0,
        maximum=2_592_000,
    )
    watchers_max: int = setting(
        10_000, "open WatchRoutes streams at most", minimum=1, maximum=1_000_000
    )
