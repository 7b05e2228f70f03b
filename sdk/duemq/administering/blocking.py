"""The synchronous admin client: the asyncio one's methods, waited for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from typing import Any, TypeVar

from duemq.administering.admin import Admin as AsyncAdmin
from duemq.administering.letters.dead_letters import Selection
from duemq.administering.letters.resending import Letter, OnSent, Resending, Resent
from duemq.descriptions import TimerDescription
from duemq.settings import Addresses, ClientSettings
from duemq.transport.loop_thread import Face, Hosted, as_in, blocking

T = TypeVar("T")


class Admin(Face):
    """Topics, groups, messages, timers, schedules and the state of the cluster.

    Connects when it is made.  No answer is partial in silence: brokers that are away are in the
    answer's `missing`; where it has none, the call raises PartialAnswer, an Unavailable, with what
    the others answered.
    """

    def __init__(
        self,
        nameserver: Addresses | None = None,
        *,
        settings: ClientSettings | None = None,
    ) -> None:
        """`nameserver`: `host:port`, several separated by commas; None: DUEMQ_NAMESERVER's.

        Raises Unavailable if none answers in `settings.connect_timeout_s`.
        """
        self._core = AsyncAdmin(nameserver, settings=settings)
        self._hosted = Hosted(self._core, "the admin client")
        self._hosted.start()

    create_topic = blocking(AsyncAdmin.create_topic)
    delete_topic = blocking(AsyncAdmin.delete_topic)
    purge_topic = blocking(AsyncAdmin.purge_topic)
    topics = blocking(AsyncAdmin.topics)
    describe_topic = blocking(AsyncAdmin.describe_topic)

    groups = blocking(AsyncAdmin.groups)
    describe_group = blocking(AsyncAdmin.describe_group)
    put_group = blocking(AsyncAdmin.put_group)
    delete_group = blocking(AsyncAdmin.delete_group)
    reset_offsets = blocking(AsyncAdmin.reset_offsets)
    skip_backlog = blocking(AsyncAdmin.skip_backlog)
    clone_offsets = blocking(AsyncAdmin.clone_offsets)

    find_messages = blocking(AsyncAdmin.find_messages)
    describe_message = blocking(AsyncAdmin.describe_message)

    purge_dead_letters = blocking(AsyncAdmin.purge_dead_letters)

    cluster = blocking(AsyncAdmin.cluster)
    forget = blocking(AsyncAdmin.forget)
    timer_stats = blocking(AsyncAdmin.timer_stats)
    count_timers = blocking(AsyncAdmin.count_timers)
    timer_histogram = blocking(AsyncAdmin.timer_histogram)
    get_timers = blocking(AsyncAdmin.get_timers)
    cancel_pending = blocking(AsyncAdmin.cancel_pending)
    shift_pending = blocking(AsyncAdmin.shift_pending)
    move_pending = blocking(AsyncAdmin.move_pending)
    timer_owners = blocking(AsyncAdmin.timer_owners)
    release_timer_shard = blocking(AsyncAdmin.release_timer_shard)
    cancel = blocking(AsyncAdmin.cancel)
    reschedule = blocking(AsyncAdmin.reschedule)
    fire = blocking(AsyncAdmin.fire)
    hold_timers = blocking(AsyncAdmin.hold_timers)
    resume_timers = blocking(AsyncAdmin.resume_timers)
    timer_holds = blocking(AsyncAdmin.timer_holds)

    put_schedule = blocking(AsyncAdmin.put_schedule)
    schedule = blocking(AsyncAdmin.schedule)
    schedules = blocking(AsyncAdmin.schedules)
    next_occurrences = blocking(AsyncAdmin.next_occurrences)
    pause_schedule = blocking(AsyncAdmin.pause_schedule)
    resume_schedule = blocking(AsyncAdmin.resume_schedule)
    delete_schedule = blocking(AsyncAdmin.delete_schedule)

    # Letters come from the loop's thread by pages, and `on_sent` is called in the caller's.

    @as_in(AsyncAdmin.dead_letters)
    def dead_letters(self, group: str, **which: Any) -> Iterator[Letter]:
        pages = self._each(self._core._letter_pages(Selection(group, **which)))
        return (letter for page in pages for letter in page)

    @as_in(AsyncAdmin.resend_dead_letters)
    def resend_dead_letters(
        self,
        group: str,
        *,
        to_topic: str | None = None,
        on_sent: OnSent | None = None,
        **which: Any,
    ) -> Resent:
        resending = Resending(on_sent)
        selection = Selection(group, **which)
        for page in self._each(self._core._resent_pages(selection, to_topic)):
            resending.add(page)
        return resending.done()

    @as_in(AsyncAdmin.list_timers)
    def list_timers(self, topic: str, **which: Any) -> Iterator[TimerDescription]:
        return self._each(self._core.list_timers(topic, **which))

    def _each(self, items: AsyncGenerator[T, None]) -> Iterator[T]:
        """What the loop thread makes, taken by this one."""

        running: list[asyncio.Task[Any]] = []

        async def following() -> T | None:
            task = asyncio.current_task()
            assert task is not None
            running[:] = [task]
            return await anext(items, None)

        async def closing() -> None:
            if running:  # one that was interrupted has to end first
                await asyncio.wait(running)
            await items.aclose()

        try:
            while (item := self._hosted.run(following())) is not None:
                yield item
        finally:
            if not self._hosted.closed:
                self._hosted.run(closing())
