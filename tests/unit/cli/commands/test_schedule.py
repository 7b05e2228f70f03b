"""Schedules as `duemq schedule list --json` prints them."""

import base64
from typing import Any

import pytest

from duemq.administering.schedules import _schedule
from duemq.v1 import message_pb2, schedule_pb2
from duemq_cli.commands.schedule import _row, _rule


@pytest.mark.parametrize(
    ("body", "fields"),
    [
        (b"go", {"body": "go"}),
        (b"\xff\x00", {"body": None, "body_base64": base64.b64encode(b"\xff\x00").decode()}),
    ],
)
def test_a_body_is_told_byte_for_byte(body: bytes, fields: dict[str, Any]) -> None:
    spec = schedule_pb2.ScheduleSpec(
        topic="t",
        every_ms=1_000,
        record=message_pb2.Record(body=body),
        dst=schedule_pb2.DST_ONCE,
        catch_up=schedule_pb2.CATCH_UP_ALL,
    )
    row = _row(_schedule(schedule_pb2.Schedule(name="s", spec=spec)))
    assert {name: row[name] for name in row if name.startswith("body")} == fields


@pytest.mark.parametrize(
    ("every_ms", "text"),
    [(1_000, "every 1s"), (1_500, "every 1500ms"), (30 * 24 * 3_600_000, "every 720h")],
)
def test_how_often_is_told_exactly(every_ms: int, text: str) -> None:
    spec = schedule_pb2.ScheduleSpec(
        topic="t",
        every_ms=every_ms,
        dst=schedule_pb2.DST_ONCE,
        catch_up=schedule_pb2.CATCH_UP_ALL,
    )
    assert _rule(_schedule(schedule_pb2.Schedule(name="s", spec=spec))) == text
