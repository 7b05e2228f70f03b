"""Contexts: clusters with a name, so that commands need no address.

    $XDG_CONFIG_HOME/duemq/contexts.json, or ~/.config/duemq/contexts.json
    {"version": 1, "current": "staging", "contexts": {"staging": {"nameserver": "ns-0:9876,ns-1"}}}

A context of a cluster with TLS has `tls`, too: paths as `ca`, `cert`, `key`.

Every call reads the file anew and writes it whole (a draft that is renamed): of two commands at the
same time one wins.
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from duemq.errors import InvalidArgument
from duemq.protocol import checks
from duemq.settings import Tls, nameservers_of

VERSION = 1
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
NAME_LIMIT = "1 to 63 of A-Z a-z 0-9 . _ -, beginning with a letter or digit"


def file() -> Path | None:
    """Where contexts are kept; None: nowhere, for who has no home, as in some containers."""
    home = os.environ.get("XDG_CONFIG_HOME")
    try:
        return Path(home or Path.home() / ".config") / "duemq" / "contexts.json"
    except RuntimeError:
        return None


@dataclass(frozen=True)
class Context:
    """How a cluster is reached."""

    nameserver: str
    tls: Tls | None = None


@dataclass
class Contexts:
    """All contexts by name.  `current`: the one that commands use; None: none."""

    by_name: dict[str, Context] = field(default_factory=dict)
    current: str | None = None

    @property
    def nameserver(self) -> str | None:
        """The current context's."""
        found = self._found
        return found.nameserver if found is not None else None

    @property
    def tls(self) -> Tls | None:
        """The current context's."""
        found = self._found
        return found.tls if found is not None else None

    @property
    def _found(self) -> Context | None:
        return self.by_name.get(self.current) if self.current else None

    def add(self, name: str, nameserver: str, tls: Tls | None = None) -> None:
        """Adds one, or gives it another address; the first one is the current.

        Raises InvalidArgument.
        """
        checks.matches("context", name, NAME, NAME_LIMIT)
        nameservers_of(nameserver)
        self.by_name[name] = Context(nameserver, tls)
        self.current = self.current or name

    def use(self, name: str) -> None:
        """Makes it the current one.  Raises InvalidArgument."""
        self._check(name)
        self.current = name

    def remove(self, name: str) -> None:
        """Forgets it; after the current one there is none.  Raises InvalidArgument."""
        self._check(name)
        del self.by_name[name]
        if self.current == name:
            self.current = None

    def _check(self, name: str) -> None:
        if name not in self.by_name:
            known = ", ".join(sorted(self.by_name)) or "none"
            raise InvalidArgument(
                f"no context {name!r}; there are: {known}", field="context", value=name, limit=known
            )


def load() -> Contexts:
    """What the file holds; no contexts without one.  Raises InvalidArgument naming the file."""
    path = file()
    if path is None:
        return Contexts()
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["version"] != VERSION:
            raise ValueError(f"version {content['version']}, known is {VERSION}")
        by_name = {str(name): _context(each) for name, each in content["contexts"].items()}
        current = content["current"]
        if current is not None and current not in by_name:  # not another cluster in silence
            raise ValueError(f"current is {current!r}, there are: {', '.join(by_name) or 'none'}")
        return Contexts(by_name, current)
    except (FileNotFoundError, NotADirectoryError):
        return Contexts()
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InvalidArgument(
            f"{path} cannot be read as contexts of duemq ({type(error).__name__}: {error}): mend it"
            " or delete it",
            field="context",
            value=str(path),
        ) from error


def _context(content: dict[str, Any]) -> Context:
    nameserver, tls = content["nameserver"], content.get("tls")
    if not isinstance(nameserver, str):
        raise TypeError(f"nameserver is {nameserver!r}, must be text")
    return Context(nameserver, Tls(**tls) if tls is not None else None)


def _content(context: Context) -> dict[str, object]:
    tls = {} if context.tls is None else {"tls": asdict(context.tls)}
    return {"nameserver": context.nameserver, **tls}


def save(contexts: Contexts) -> None:
    """Writes the file.  Raises OSError, InvalidArgument if there is no place for it."""
    path = file()
    if path is None:
        raise InvalidArgument(
            "contexts cannot be kept: this user has no home directory; set HOME or XDG_CONFIG_HOME",
            field="XDG_CONFIG_HOME",
            limit="a directory",
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "version": VERSION,
        "current": contexts.current,
        "contexts": {name: _content(each) for name, each in contexts.by_name.items()},
    }
    draft = path.with_suffix(f".{os.getpid()}.tmp")
    draft.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    draft.replace(path)
