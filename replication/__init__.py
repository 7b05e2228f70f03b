"""Replicas of a log: who leads, who is in sync, what is committed.

| folder, module | what |
|----------------|------|
| `protocol`     | the rules, pure: `now_ms` and events in, decisions out |
| `stores`       | where a group's record lies: changed by compare-and-set only |
| `disk_id`      | names a data directory for ever |
"""
