"""The matrix as people read it."""

from duemq_server.bench.matrix.table import COLUMNS, lines


def row(**figures: float | None) -> dict[str, float | None]:
    return {**dict.fromkeys(COLUMNS, 1.5), **figures}


def test_what_follows_the_first_row_has_its_ratio_to_it() -> None:
    header, _, first, second = lines(
        [(10_000, row(accepted_per_s=20_000)), (1_000_000, row(accepted_per_s=15_000, p50_ms=3.0))]
    )
    assert header.split()[:2] == ["pending", "accept/s"]
    assert first.split()[:2] == ["10,000", "20,000"]
    assert "×" not in first
    assert second.split()[:3] == ["1,000,000", "15,000", "×0.75"]
    assert "3 ×2.00" in second


def test_what_is_not_known_or_has_no_ratio() -> None:
    *_, first, second = lines(
        [(1, row(index_bytes_per_timer=None, p50_ms=0.0)), (2, row(p50_ms=4.0))]
    )
    assert first.split()[-1] == "-"
    assert second.split()[-1] == "1.5"
    assert " 4  " in second


def test_no_rows() -> None:
    assert len(lines([])) == 2
