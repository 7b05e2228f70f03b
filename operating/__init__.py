"""What an operator asks of replicas: `duemq replica`.

Modules: `command` (the commands), `deciding` (those that lose something, or might), `groups` (where
the replicas are), `asking` (calls to them).
"""
