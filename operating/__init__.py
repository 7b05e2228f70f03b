"""What an operator asks of replicas: `duemq replica`.

Modules: `command` (the commands), `deciding` (those that are done when told twice), `groups` (where
the replicas are), `asking` (calls to them), `rows` (what they answered).
"""
