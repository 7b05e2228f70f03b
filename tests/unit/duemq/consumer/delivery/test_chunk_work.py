from duemq.consumer.delivery.chunk_work import Stalls


def test_time_counts_while_the_position_stays() -> None:
    stalls = Stalls[str]()
    assert stalls.look(10.0, {"a": 0, "b": 5}) == {"a": 0.0, "b": 0.0}
    assert stalls.look(10.5, {"a": 0, "b": 6}) == {"a": 0.5, "b": 0.0}
    assert stalls.look(12.0, {"a": 0, "b": 6}) == {"a": 2.0, "b": 1.5}
    assert stalls.look(13.0, {"a": 1}) == {"a": 0.0}


def test_what_has_ended_is_forgotten() -> None:
    stalls = Stalls[str]()
    stalls.look(1.0, {"a": 0})
    stalls.look(2.0, {})
    assert stalls.look(3.0, {"a": 0}) == {"a": 0.0}
