"""A job of a shard's housekeeping, whose steps come between those of all else."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from duemq_server.timer_service.disk.housekeeping import Job, Save
from tests.property.timer_world import World


class JobSteps(RuleBasedStateMachine):
    """For machines with a `world`."""

    world: World

    def __init__(self) -> None:
        super().__init__()
        self.job: Job | None = None
        self.job_ran = False

    @rule(flush=st.booleans())
    def job_step(self, flush: bool) -> None:
        world, scheduler = self.world, self.world.scheduler
        if self.job is None:
            if flush and scheduler.tiers.memtable.rows:
                self.job = scheduler.tiers.begin_flush(world.now_ms)
            else:
                self.job = world.directory.housekeeper.next_job(world.now_ms)
            self.job_ran = False
        elif not self.job_ran:
            if isinstance(self.job, Save):
                world.sync()
            self.job.run()
            self.job_ran = True
        else:
            world.directory.housekeeper.finish(self.job, world.now_ms)
            self.job = None

    @precondition(lambda self: self.job is not None and not self.job_ran)
    @rule()
    def the_job_finds_no_space(self) -> None:
        assert self.job is not None
        self.world.directory.housekeeper.no_space(self.job, self.world.now_ms)
        self.job = None
