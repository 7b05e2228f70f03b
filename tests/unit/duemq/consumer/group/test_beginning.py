import asyncio

from duemq.consumer.group.group_share import Beginning


async def test_a_member_has_begun_when_all_brokers_of_its_first_queues_were_tried() -> None:
    beginning = Beginning(60)
    assert not beginning.over.is_set()
    beginning.assigned(["a", "b"])
    beginning.tried("a")
    beginning.assigned(["c"])
    assert not beginning.over.is_set()
    beginning.tried("b")
    assert beginning.over.is_set()


async def test_a_member_without_queues_has_begun_when_the_group_has_answered() -> None:
    beginning = Beginning(60)
    beginning.tried("a")
    assert not beginning.over.is_set()
    beginning.assigned([])
    assert beginning.over.is_set()


async def test_a_broker_that_does_not_answer_is_waited_for_no_longer() -> None:
    beginning = Beginning(0)
    beginning.assigned(["a"])
    async with asyncio.timeout(30):
        await beginning.over.wait()
