from duemq.protocol.pieces import Pieces, finish, parts


def test_finish_answers_what_the_work_returns() -> None:
    done = []

    def work() -> Pieces[str]:
        for number in range(3):
            done.append(number)
            yield
        return "all"

    assert finish(work()) == "all"
    assert done == [0, 1, 2]


def test_parts_are_all_items_in_order_and_no_longer_than_asked() -> None:
    assert list(parts(iter(range(5)), 2)) == [(0, 1), (2, 3), (4,)]
    assert list(parts((), 2)) == []
