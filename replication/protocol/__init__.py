"""The rules of a group of replicas.  Plain Python: no clock, no socket, no file.

| module      | what |
|-------------|------|
| `record`    | the group's record and every way to change it |
| `epochs`    | where epochs begin in a log; how much two logs have in common |
| `messages`  | what leader and follower tell each other |
| `in_sync`   | the in-sync set, while changes of it are under way |
| `leader`    | the high watermark, admission and removal |
| `followers` | a follower's progress; who cannot follow |
| `follower`  | following a log |
| `election`  | when to try to lead |
| `times`     | durations, none of which safety rests on |
"""
