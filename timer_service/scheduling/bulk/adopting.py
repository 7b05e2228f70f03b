"""Jobs that other shards have known for longer than a new one has had any timers.

Owned and run by: the thread that owns the scheduler.  No clock, no waiting.

What a new shard takes over came behind them: when one is asked for again, nothing is touched here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from duemq.errors import Unavailable
from duemq_server.timer_service.scheduling.bulk import entry
from duemq_server.timer_service.scheduling.bulk.jobs import Job, Which
from duemq_server.timer_service.timers import log_entries

if TYPE_CHECKING:
    from duemq_server.timer_service.scheduling.scheduler import Scheduler


def adopt(scheduler: Scheduler, now_ms: int, theirs: Mapping[bytes, Which]) -> int:
    """These jobs are over here, unless timers are pending; how many are new.

    Raises Unavailable: another one is open; LogFull, DiskFull: call again.
    """
    if not scheduler.ledger.empty:
        return 0
    jobs, new = scheduler.bulk, 0
    for job_id, which in theirs.items():
        if jobs.find(job_id) is not None:
            continue
        if jobs.open is not None or jobs.behind is not None:
            raise Unavailable("a bulk job is under way at this new timer shard")
        job = Job(job_id, which, {})
        scheduler.log.append(log_entries.BULK, [entry.accepted(job, now_ms)])
        jobs.open = job  # without fences it touches nothing, whoever ends it
        scheduler.log.append(log_entries.BULK, [entry.over(job, "", now_ms)])
        jobs.finish(now_ms, "")
        new += 1
    return new
