"""`python -m duemq_server.demo` is `duemq demo`."""

from __future__ import annotations

from duemq_server.demo.command import demo

if __name__ == "__main__":
    demo()
