"""The admin client is made of parts, which share one object."""

from collections import defaultdict

from duemq import aio

OF_CLIENTS = {"start", "close", "_timer_calls_now"}


def test_no_part_takes_the_place_of_another_one_s_method():
    owners = defaultdict(list)
    for part in aio.Admin.__mro__[:-1]:
        for name in vars(part):
            if not name.startswith(("__", "_abc_")):
                owners[name].append(part.__name__)
    shared = {name: found for name, found in owners.items() if len(found) > 1}
    assert shared.keys() == OF_CLIENTS, shared
