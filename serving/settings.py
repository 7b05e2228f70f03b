"""Typed settings of a process: flag > environment > TOML file > default.

A process has one frozen dataclass; every field is made by `setting()`.  From the field
`segment_bytes` follow the flag `--segment-bytes`, the variable `DUEMQ_SEGMENT_BYTES` and the TOML
key `segment_bytes` (or `segment-bytes`); `--config FILE` or `DUEMQ_CONFIG` names the file.  By the
field's unit,

    unit "s"       a duration: 10, 0.5, "500ms", "10s", "5m", "1h", "3d"; kept as float seconds
    unit "bytes"   a size: 4096, "64KiB", "4MiB", "18.8GiB", "2TiB"; kept as int, its whole bytes

Tuples are comma-separated in flags and variables, lists in TOML.  A value that is wrong, and a key
of the file that does not exist, is an InvalidArgument that names the setting, where it came from
and the limit.
"""

import argparse
import dataclasses
import ipaddress
import os
import re
import sys
import tomllib
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from duemq.errors import InvalidArgument
from duemq.settings import Tls
from duemq_server.serving.amounts import duration, size

ENVIRONMENT_PREFIX = "DUEMQ_"
_TRUE = frozenset({"true", "1", "yes", "on"})
_FALSE = frozenset({"false", "0", "no", "off"})

S = TypeVar("S")


def setting(
    default: Any = dataclasses.MISSING,
    help: str = "",
    *,
    unit: str = "",
    minimum: float | None = None,
    maximum: float | None = None,
    choices: Sequence[str] = (),
) -> Any:
    """A field of a settings class.  `help` is its meaning; without `default` it must be given."""
    metadata = {"help": help, "unit": unit, "min": minimum, "max": maximum, "choices": choices}
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProcessSettings:
    """What every process of DueMQ can be told."""

    listen: str = setting("127.0.0.1:0", "HOST:PORT to serve gRPC on; port 0: any free one")
    advertise: str = setting(
        "", "HOST:PORT by which others reach this process; empty: the address that it listens on"
    )
    external_listen: str = setting(
        "",
        "HOST:PORT of a second port, for clients that cannot reach the first: they are told"
        " external addresses; empty: off",
    )
    metrics_listen: str = setting(
        "", "HOST:PORT to serve Prometheus metrics on (port 0: any free one); empty: off"
    )
    log_level: str = setting(
        "INFO", "least severe log lines to write", choices=("DEBUG", "INFO", "WARNING", "ERROR")
    )
    log_format: str = setting("text", "form of the log on stderr", choices=("text", "json"))
    tls_cert: str = setting(
        "",
        "PEM file with the certificate that is shown to clients and other services; empty: no TLS",
    )
    tls_key: str = setting("", "PEM file with its key")
    tls_ca: str = setting(
        "",
        "PEM file with the authorities whose certificates count; empty: those that gRPC knows",
    )
    tls_verify_clients: bool = setting(
        False, "only clients with a certificate of tls_ca are served"
    )
    permissions: str = setting(
        "", "TOML file that says who may do what, by names in certificates; empty: all, everything"
    )
    health_listen: str = setting(
        "", "HOST:PORT that serves gRPC health without TLS, for probes; empty: off"
    )
    drain_timeout: float = setting(
        10.0, "how long calls may take to end on a clean stop", unit="s", minimum=0, maximum=3600
    )
    unsent_bytes_max: int = setting(
        256 << 20,
        "answers that clients have not read yet, in all; a connection may have an eighth of it",
        unit="bytes",
        minimum=1 << 20,
        maximum=1 << 40,
    )
    unread_timeout: float = setting(
        60.0,
        "how long a client may take to read an answer; then its connection is closed",
        unit="s",
        minimum=1,
        maximum=3600,
    )

    def __post_init__(self) -> None:
        check(self)
        check_address("listen", self.listen, port_min=0)
        if self.advertise and check_address("advertise", self.advertise)[0] in WILDCARDS:
            raise _wrong("advertise", self.advertise, "an address by which others reach this one")
        for more in ("external_listen", "metrics_listen", "health_listen"):
            if getattr(self, more):
                check_address(more, getattr(self, more), port_min=0)
        self._check_tls()

    def _check_tls(self) -> None:
        if self.tls_cert and not self.tls_key:
            raise InvalidArgument("tls_key must be given with tls_cert", field="tls_key")
        for given in ("tls_key", "tls_ca"):
            if getattr(self, given) and not self.tls_cert:
                raise InvalidArgument(f"tls_cert must be given with {given}", field="tls_cert")
        if self.tls_verify_clients and not self.tls_ca:
            raise InvalidArgument("tls_ca must be given with tls_verify_clients", field="tls_ca")
        if self.permissions and not self.tls_verify_clients:
            raise InvalidArgument(
                "tls_verify_clients must be given with permissions: who calls is known by"
                " certificates",
                field="tls_verify_clients",
            )

    @property
    def tls(self) -> Tls | None:
        """Of connections to other services, which show the same certificate; None: without."""
        if not self.tls_cert:
            return None
        return Tls(ca=self.tls_ca, cert=self.tls_cert, key=self.tls_key)


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemberSettings(ProcessSettings):
    """What a process that registers at nameservers and keeps data can be told besides."""

    name: str = setting("", "unique name of this instance in the cluster, kept over restarts")
    data_dir: str = setting("", "folder for its data; made if missing; one process a folder")
    nameservers: tuple[str, ...] = setting(
        ("127.0.0.1:9876",), "HOST:PORT of every nameserver of the cluster"
    )
    heartbeat_period: float = setting(
        10.0, "between two heartbeats to a nameserver", unit="s", minimum=0.05, maximum=600
    )
    external_advertise: str = setting(
        "",
        "HOST:PORT by which clients outside reach external_listen, as nameservers tell them; or"
        " NAME=HOST:PORT,… of several processes, of which each takes its own (a replica's NAME is"
        " GROUP/REPLICA); empty: the address that it listens on",
    )
    tracing: str = setting(
        "off",
        "where spans go: to the %TRACE% topic, or to an OTLP collector set up by OTEL_ variables",
        choices=("off", "duemq", "otlp"),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for given in ("name", "data_dir"):
            if not getattr(self, given):
                raise InvalidArgument(f"{given} must be given", field=given)
        check_name("name", self.name)
        if not self.nameservers:
            raise InvalidArgument("nameservers must name at least one", field="nameservers")
        for address in self.nameservers:
            check_address("nameservers", address)
        self._check_external()

    def _check_external(self) -> None:
        given = self.external_advertise
        if given and not self.external_listen:
            raise InvalidArgument(
                "external_listen must be given with external_advertise", field="external_listen"
            )
        told = self.external_advertised
        if told:
            check_address("external_advertise", told)
        elif given:
            raise _wrong("external_advertise", given, f"{self.own_name}=HOST:PORT among others")
        told = told or self.external_listen
        if told and check_address("external_advertise", told, port_min=0)[0] in WILDCARDS:
            limit = "an address by which clients outside reach this process"
            raise _wrong("external_advertise", given, limit)

    @property
    def own_name(self) -> str:
        """Of this process alone."""
        return self.name

    @property
    def external_advertised(self) -> str:
        """What `external_advertise` says of this process; empty: nothing."""
        given = self.external_advertise
        if "=" not in given:
            return given
        each = (part.strip().partition("=") for part in given.split(","))
        return {name: address for name, _, address in each}.get(self.own_name, "")


def load(
    kind: type[S], argv: Sequence[str] | None = None, env: Mapping[str, str] | None = None
) -> S:
    """The settings of this process.  What is wrong ends the process with status 2 and says so."""
    parser = _parser(kind)
    given = parser.parse_args(sys.argv[1:] if argv is None else argv)
    try:
        return _resolve(kind, given, os.environ if env is None else env)
    except InvalidArgument as error:
        parser.error(str(error))


def read(kind: type[S], argv: Sequence[str], env: Mapping[str, str]) -> S:
    """As `load`, but raises InvalidArgument for a wrong value."""
    return _resolve(kind, _parser(kind).parse_args(argv), env)


def names(kind: type[Any]) -> tuple[str, ...]:
    """The names of all settings of a class."""
    return tuple(field.name for field in dataclasses.fields(kind))


def flag(name: str) -> str:
    """The flag of a setting."""
    return "--" + name.replace("_", "-")


def variable(name: str) -> str:
    """The environment variable of a setting."""
    return ENVIRONMENT_PREFIX + name.upper()


def check(settings: Any) -> None:
    """Checks every field's range and choices.  For `__post_init__`."""
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        lowest, highest = field.metadata.get("min"), field.metadata.get("max")
        if (lowest is not None and value < lowest) or (highest is not None and value > highest):
            raise _wrong(field.name, value, _range(lowest, highest))
        choices = field.metadata.get("choices")
        if choices and value not in choices:
            raise _wrong(field.name, value, "one of " + ", ".join(choices))


# Of DNS.
HOST_CHARS_MAX = 253
WILDCARDS = ("0.0.0.0", "::")
"""Hosts to listen on that mean, the one as the other, all addresses, IPv4 and IPv6."""


def check_address(field: str, address: str, port_min: int = 1) -> tuple[str, int]:
    """Host and port of HOST:PORT or [IPV6]:PORT.  Raises InvalidArgument naming `field`."""
    host, colon, port = address.rpartition(":")
    if not colon or not host or not port.isascii() or not port.isdigit():
        raise _wrong(field, address, "HOST:PORT")
    if any(sign in host for sign in ":[]") and not _is_bracketed_ipv6(host):
        raise _wrong(field, address, "HOST:PORT, an IPv6 address in brackets")
    if not re.fullmatch(r"[!-~]+", host):
        raise _wrong(field, address, "a host of ASCII characters, without spaces")
    if len(host) > HOST_CHARS_MAX:
        raise _wrong(field, address[:HOST_CHARS_MAX], f"a host of at most {HOST_CHARS_MAX}")
    if len(port) > 5 or not port_min <= int(port) <= 65535:
        raise _wrong(field, address, f"a port of {port_min} to 65535")
    return host.strip("[]"), int(port)


def _is_bracketed_ipv6(host: str) -> bool:
    try:
        ipaddress.IPv6Address(host[1:-1])
    except ValueError:
        return False
    return host == f"[{host[1:-1]}]"


def joined(host: str, port: int | str) -> str:
    """HOST:PORT, an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def check_name(field: str, name: str) -> None:
    """Checks the name of an instance: 1 to 127 of A-Z a-z 0-9 _ . -"""
    if not re.fullmatch(r"[A-Za-z0-9_.-]{1,127}", name):
        raise _wrong(field, name, "1 to 127 of A-Z a-z 0-9 _ . -")


def _range(lowest: float | None, highest: float | None) -> str:
    if lowest is None:
        return f"at most {highest}"
    return f"at least {lowest}" if highest is None else f"{lowest} to {highest}"


def _wrong(name: str, value: object, limit: str, source: str = "") -> InvalidArgument:
    shown = f"{name} is {value!r}" + (f" ({source})" if source else "")
    return InvalidArgument(f"{shown}, must be {limit}", field=name, value=value, limit=limit)


def _parser(kind: type[Any]) -> argparse.ArgumentParser:
    summary = (kind.__doc__ or "").strip().split("\n")[0]
    service = kind.__module__.split(".")[-2].replace("_", "-")
    parser = argparse.ArgumentParser(
        prog=f"duemq-{service}",
        description=summary,
        epilog=f"Each flag can also be given as {variable('<name>')} or in the file of --config.",
        allow_abbrev=False,
    )
    parser.add_argument("--config", metavar="FILE", help="TOML file with settings")
    for field in dataclasses.fields(kind):
        _add_flag(parser, field)
    return parser


def _add_flag(parser: argparse.ArgumentParser, field: "dataclasses.Field[Any]") -> None:
    text = str(field.metadata.get("help", "")).replace("%", "%%")
    if field.default is not dataclasses.MISSING and field.default not in ("", ()):
        text += f" (default: {_shown(field.default)})".replace("%", "%%")
    if isinstance(field.default, bool):
        action = argparse.BooleanOptionalAction
        parser.add_argument(
            flag(field.name), dest=field.name, action=action, default=None, help=text
        )
        return
    metavar = {"s": "DURATION", "bytes": "SIZE"}.get(field.metadata.get("unit", ""))
    metavar = metavar or "|".join(field.metadata.get("choices", ())) or field.name.upper()
    parser.add_argument(flag(field.name), dest=field.name, metavar=metavar, default=None, help=text)


def _shown(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _resolve(kind: type[S], given: argparse.Namespace, env: Mapping[str, str]) -> S:
    config = given.config or env.get(variable("config"), "")
    file = _read_file(kind, config) if config else {}
    types = typing.get_type_hints(kind)
    values: dict[str, Any] = {}
    for field in dataclasses.fields(typing.cast(Any, kind)):
        name = field.name
        if getattr(given, name) is not None:
            raw, source = getattr(given, name), flag(name)
        elif variable(name) in env:
            raw, source = env[variable(name)], variable(name)
        elif name in file:
            raw, source = file[name], config
        elif field.default is dataclasses.MISSING:
            raise InvalidArgument(
                f"{name} must be given ({flag(name)} or {variable(name)})", field=name
            )
        else:
            continue
        try:
            values[name] = _convert(raw, types[name], field.metadata.get("unit", ""))
        except ValueError as error:
            raise _wrong(name, raw, str(error), source) from None
    return kind(**values)


def _read_file(kind: type[Any], path: str) -> dict[str, Any]:
    try:
        content = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InvalidArgument(f"{path}: {error}", field="config", value=path) from error
    known = set(names(kind))
    found = {key.replace("-", "_"): value for key, value in content.items()}
    for key in found:
        if key not in known:
            raise InvalidArgument(f"{path}: there is no setting {key!r}", field="config", value=key)
    return found


def _convert(raw: Any, kind: Any, unit: str) -> Any:
    if unit == "s":
        return duration(raw)
    if unit == "bytes":
        return size(raw)
    if kind is bool:
        return _boolean(raw)
    if kind is int or kind is float:
        return _number(raw, kind)
    if typing.get_origin(kind) is tuple:
        parts = raw.split(",") if isinstance(raw, str) else raw
        if not isinstance(parts, list):
            raise ValueError("a list")
        return tuple(str(part).strip() for part in parts if str(part).strip())
    if not isinstance(raw, str):
        raise ValueError("text")
    return raw


def _boolean(raw: Any) -> bool:
    if isinstance(raw, bool):
        return raw
    lowered = str(raw).strip().lower()
    if lowered not in _TRUE | _FALSE:
        raise ValueError("true or false")
    return lowered in _TRUE


def _number(raw: Any, kind: type[int] | type[float]) -> int | float:
    expected = "a whole number" if kind is int else "a number"
    if isinstance(raw, bool) or (kind is int and isinstance(raw, float)):
        raise ValueError(expected)
    try:
        return kind(raw)
    except (TypeError, ValueError):
        raise ValueError(expected) from None
