"""Consumer groups, asked of all brokers: who is in them, how far they are, their settings."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import replace

from duemq.administering.asking import SHOWN_WITHOUT_TIMEOUT_S, Answers, Asking, refuse_missing
from duemq.descriptions import GroupDescription, GroupSummary, MemberDescription, Progress
from duemq.errors import GroupNotFound, InvalidArgument, MissingBroker, PermissionDenied
from duemq.protocol.retry_policy import Delay, ExponentialDelays, RetryPolicy, policy_of
from duemq.v1 import group_admin_pb2, group_pb2, stubs

# Groups whose lag is asked for side by side.
LAGS_AT_ONCE = 16

Place = tuple[str, str, int]


class Groups(Asking):
    """What the admin client does about groups."""

    async def groups(self, *, lag: bool = False) -> list[GroupSummary]:
        """All consumer groups with members, offsets or settings, sorted by name.

        `lag`: with how far each is behind: a question more a group.  Raises PartialAnswer, whose
        `partial` is the list, if a broker is away.
        """
        answers = await self._asker.each(
            stubs.GroupCoordinatorStub.ask("ListGroups", group_pb2.ListGroupsRequest())
        )
        found: dict[str, GroupSummary] = {}
        for broker, answer in answers.by_broker.items():
            for group in answer.groups:
                if group.coordinator or group.group not in found:
                    found[group.group] = GroupSummary(
                        group.group,
                        group.members,
                        group.generation,
                        broker if group.coordinator else None,
                    )
        groups = [found[name] for name in sorted(found)]
        missing = {each.name: each for each in answers.missing}
        if lag:
            groups = await self._with_lags(groups, missing)
        refuse_missing([missing[name] for name in sorted(missing)], partial=groups)
        return groups

    async def _with_lags(
        self, groups: list[GroupSummary], missing: dict[str, MissingBroker]
    ) -> list[GroupSummary]:
        """With how far each is behind; who does not answer joins `missing`."""
        free = asyncio.Semaphore(LAGS_AT_ONCE)

        async def with_lag(group: GroupSummary) -> GroupSummary:
            async with free:
                try:
                    progress = await self._progress_of(group.name, SHOWN_WITHOUT_TIMEOUT_S)
                except PermissionDenied:
                    return group
            missing.update((each.name, each) for each in progress.missing)
            queues = [q for answer in progress.by_broker.values() for q in answer.queues]
            return replace(
                group,
                lag=sum(queue.lag for queue in queues),
                lag_ms=max((queue.lag_ms for queue in queues), default=0),
            )

        return list(await asyncio.gather(*map(with_lag, groups)))

    async def _progress_of(
        self, name: str, timeout_s: float
    ) -> Answers[group_admin_pb2.GroupProgress]:
        request = group_admin_pb2.DescribeProgressRequest(group=name)
        return await self._asker.each(
            stubs.GroupAdminStub.ask("DescribeProgress", request),
            (GroupNotFound,),
            timeout_s,
        )

    async def describe_group(self, name: str) -> GroupDescription:
        """A group: members, assignment, and how far it is in each queue.

        Brokers that do not answer are in `missing`; all others in the rest.  Raises GroupNotFound,
        and Unavailable if only a missing broker could know it.
        """
        return await self._group_described(name, SHOWN_WITHOUT_TIMEOUT_S)

    async def _group_described(self, name: str, timeout_s: float) -> GroupDescription:
        view_of = group_pb2.DescribeGroupRequest(group=name)
        views, progress = await asyncio.gather(
            self._asker.each(
                stubs.GroupCoordinatorStub.ask("DescribeGroup", view_of),
                (GroupNotFound,),
                timeout_s,
            ),
            self._progress_of(name, timeout_s),
        )
        missing = {each.name: each for each in (*views.missing, *progress.missing)}
        if not views.by_broker and not progress.by_broker:
            refuse_missing(list(missing.values()), f"the others know no group {name!r}")
            raise GroupNotFound(f"no group {name!r}", field="name", value=name)
        there = {broker.name for broker in self._asker.brokers()} - missing.keys()
        return _joined(name, views.by_broker, progress.by_broker, there, list(missing.values()))

    async def put_group(
        self,
        name: str,
        *,
        retries_max: int | None = None,
        retry_delays: Sequence[Delay] | str | None = None,
        exponential: ExponentialDelays | tuple[Delay, float, Delay] | None = None,
    ) -> RetryPolicy:
        """Makes a group at every live broker, or replaces its settings; answers what is in force.

        `retries_max`: deliveries after the first.  `retry_delays`: before each retry, the last one
        for all beyond; a list, or one text as "10s 30s 1m".  `exponential` in its place:
        (initial, multiplier, longest).  What is not given is as the brokers are set.  A group need
        not be made to be used, unless the brokers are set so.  Raises InvalidArgument, and
        Unavailable if a broker is away: call again when it is back.
        """
        policy = policy_of(retries_max, retry_delays, exponential)
        request = group_admin_pb2.PutGroupRequest(group={"group": name})
        policy.write(request.group.retry)
        answers = await self._asker.each(
            stubs.GroupAdminStub.ask("PutGroup", request),
            timeout_s=self._asker.timeout_s,
        )
        refuse_missing(answers.missing, done_at(answers.by_broker, "have the settings"))
        return RetryPolicy.received(next(iter(answers.by_broker.values())).retry)

    async def delete_group(self, name: str) -> None:
        """Forgets a group's settings and offsets, and its retries; its dead letters stay.

        Raises GroupNotFound, InvalidArgument while it has members, and Unavailable if a broker is
        away.
        """
        found = await self._group_described(name, self._asker.timeout_s)
        refuse_missing(found.missing, "nothing was deleted")
        if found.members or found.waits_until_ms:
            raise InvalidArgument(
                f"group {name!r} has {len(found.members)} members, or awaits some: close them",
                field="group",
                value=name,
                limit="a group without members",
            )
        request = group_admin_pb2.DeleteGroupRequest(group=name)
        answers = await self._asker.each(
            stubs.GroupAdminStub.ask("DeleteGroup", request),
            (GroupNotFound,),  # also when it was deleted and the answer was lost
            self._asker.timeout_s,
        )
        refuse_missing(answers.missing, done_at(answers.by_broker, "have deleted the group"))


def done_at(by_broker: Iterable[str], what: str) -> str:
    """Which brokers have done what others have not, for people."""
    names = ", ".join(by_broker)
    return f"{names} {what}; call again when all are there" if names else "nothing was changed"


def _joined(
    name: str,
    views: Mapping[str, group_pb2.GroupDescription],
    progress: Mapping[str, group_admin_pb2.GroupProgress],
    there: Set[str],
    missing: Iterable[MissingBroker],
) -> GroupDescription:
    """`there`: the brokers that have answered, also those that do not know the group."""
    coordinator = next((broker for broker, view in views.items() if view.coordinator), None)
    view = views[coordinator] if coordinator else group_pb2.GroupDescription(group=name)
    owners = {
        (queue.topic, queue.broker, queue.queue_id): member.member_id
        for member in view.members
        for queue in member.queues
    }
    queues = [
        _progress(broker, queue, owners)
        for broker, answer in progress.items()
        for queue in answer.queues
    ]
    put = {broker: answer.config for broker, answer in progress.items() if answer.put}
    configs = [*put.values(), *(answer.config for answer in progress.values())]
    return GroupDescription(
        name,
        coordinator,
        view.generation,
        view.strategy,
        tuple(map(_member, view.members)),
        tuple(sorted(queues, key=lambda each: (each.topic, each.broker, each.queue))),
        retry=RetryPolicy.received(configs[0].retry) if configs else None,
        without_settings=tuple(sorted(there - put.keys())) if put else (),
        sent_back=sum(answer.sent_back for answer in progress.values()),
        dead_letters=sum(answer.dead_letters for answer in progress.values()),
        dead_letters_kept=sum(answer.dlq_messages for answer in progress.values()),
        retries_waiting=sum(answer.retries_waiting for answer in progress.values()),
        waits_until_ms=view.waits_until_ms or None,
        missing=tuple(sorted(missing, key=lambda each: each.name)),
    )


def _member(member: group_pb2.MemberDescription) -> MemberDescription:
    return MemberDescription(
        member.member_id,
        member.client,
        {each.topic: each.filter for each in member.subscriptions},
        tuple(sorted((queue.topic, queue.broker, queue.queue_id) for queue in member.queues)),
        member.last_heartbeat_ms,
        member.session_timeout_ms,
        member.incarnation,
        member.leaving,
    )


def _progress(
    broker: str, queue: group_admin_pb2.QueueProgress, owners: Mapping[Place, str]
) -> Progress:
    return Progress(
        queue.topic,
        broker,
        queue.queue_id,
        owners.get((queue.topic, broker, queue.queue_id)),
        queue.offset,
        queue.min_offset,
        queue.max_offset,
        generation=queue.generation,
        lag_ms=queue.lag_ms,
        in_flight=max(0, queue.pulled_offset - queue.offset - queue.settled),
        settled=queue.settled,
        consumed_per_s=queue.consumed_per_s,
        last_commit_ms=queue.last_commit_ms or None,
        lag=queue.lag,
    )
