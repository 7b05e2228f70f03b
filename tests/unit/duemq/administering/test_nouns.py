"""The admin client is one class a noun: these must not take names from one another."""

from itertools import combinations

from duemq.aio import Admin


def test_no_name_means_two_things() -> None:
    nouns = [each for each in Admin.__mro__[1:] if each.__module__.startswith("duemq.")]
    for one, other in combinations(nouns, 2):
        if not issubclass(one, other):
            both = {name for name in vars(one).keys() & vars(other) if not name.startswith("__")}
            assert both <= {"_abc_impl"}, (one, other)
