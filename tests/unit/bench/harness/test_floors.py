"""Floors answer rates and latencies of what they were told to do."""

from pathlib import Path

from duemq_server.bench.harness import floors


def test_durable_writes_measure_each_frame(tmp_path: Path) -> None:
    floor = floors.durable_writes(tmp_path, 64, 4, 40)
    assert floor.msgs_per_s > 0
    assert set(floor.latency) == {"p50_ms", "p99_ms", "max_ms"}
    assert list(tmp_path.iterdir()) == []


def test_decoded_reads_touch_every_body(tmp_path: Path) -> None:
    assert floors.decoded_reads(tmp_path, 1024, 2000).msgs_per_s > 0


def test_indexed_reads_count_what_is_left_out_too(tmp_path: Path) -> None:
    assert floors.indexed_reads(tmp_path, 64, 10_000, 100).msgs_per_s > 0


def test_timed_writes_are_never_early(tmp_path: Path) -> None:
    floor = floors.timed_writes(tmp_path, 64, 1000, 0.05)
    assert floor.latency["p50_ms"] > 0
