"""What both ends of a call must agree on: errors and statuses, limits, keepalive, settings, routes.

`status`, `channel`, `watch` serve clients and services and need gRPC only; `process`, `server`,
`logging` and `metrics` serve services and need the extra `duemq[server]`.  `settings` is plain
Python.
"""
