"""Bodies that lie in one byte string."""

import numpy as np
import pytest

from duemq_server.timer_service.far.bodies import Joined


@pytest.mark.parametrize("index", [[], [0], [0, 1, 2, 3], [1, 2], [3, 0], [2, 1, 0], [0, 1, 3]])
def test_some_of_them_follow_each_other_as_asked(index: list[int]) -> None:
    bodies = [b"one", b"", b"three", b"4"]
    joined = Joined.of(bodies)

    some = joined.take(np.array(index, dtype=np.int64))

    assert some.bytes() == b"".join(bodies[n] for n in index)
    assert [some.at(n) for n in range(len(index))] == [bodies[n] for n in index]
