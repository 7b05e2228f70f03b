"""Inputs of `duemq send`: order is kept, and a bad entry does not stop the rest."""

import io
import json
import os

import pytest

from duemq.errors import InvalidArgument
from duemq_cli import inputs


def lines(text: bytes) -> io.BytesIO:
    return io.BytesIO(text)


def test_an_argument_goes_out_byte_for_byte_whatever_it_is() -> None:
    for given in (b"", "h\u00e9 \u2713".encode(), b"\xff\xfe"):
        [entry] = inputs.from_argument(os.fsdecode(given))
        assert entry.body == given


def test_lines_are_bodies_without_their_ends() -> None:
    entries = list(inputs.from_lines(lines(b"one\r\ntwo\n\nfour")))
    assert [(e.line, e.body) for e in entries] == [(1, b"one"), (2, b"two"), (3, b""), (4, b"four")]


def test_jsonl_goes_out_as_written_and_blank_lines_are_skipped() -> None:
    entries = list(inputs.from_jsonl(lines(b'{"a": 1}\n\n[1,2]\n')))
    assert [(e.line, e.body, e.columns) for e in entries] == [
        (1, b'{"a": 1}', {"a": 1}),
        (3, b"[1,2]", {}),
    ]


def test_a_bad_json_line_is_an_error_in_its_place() -> None:
    entries = list(inputs.from_jsonl(lines(b"1\nnope\n3\n")))
    assert [bool(e.error) for e in entries] == [False, True, False]
    assert entries[1].error is not None
    assert "line 2" in str(entries[1].error)


def test_csv_rows_become_json_objects() -> None:
    text = '\ufeffcity,note\n"Zürich","a\nb"\n'.encode()
    (entry,) = inputs.from_csv(lines(text))
    assert json.loads(entry.body) == entry.columns == {"city": "Zürich", "note": "a\nb"}


@pytest.mark.parametrize("bad", [b"1,2,3\n", b"\xff,2\n", b'"a"b,2\n'])
def test_a_bad_csv_row_is_an_error_and_the_rest_is_read(bad: bytes) -> None:
    entries = list(inputs.from_csv(lines(b"x,y\n1,2\n" + bad + b"3,4\n")))
    assert [(e.line, bool(e.error)) for e in entries] == [(2, False), (3, True), (4, False)]
    assert "line 3" in str(entries[1].error)
    assert entries[2].columns == {"x": "3", "y": "4"}


@pytest.mark.parametrize("header", [b"gr\xf6\xdfe,x\n", b'"a"b,x\n', b"x,y,x\n"])
def test_a_header_that_gives_no_columns_is_no_row_and_no_row_is_the_header(header: bytes) -> None:
    with pytest.raises(InvalidArgument):
        list(inputs.from_csv(lines(header + b"1,2\n3,4\n")))


def test_columns_without_a_name_may_be_several() -> None:
    (entry,) = inputs.from_csv(lines(b"x,,\n1,,\n"))
    assert entry.columns == {"x": "1", "": ""}


def test_json_that_is_nested_too_deep_is_an_error_in_its_place() -> None:
    deep = b"[" * 100_000 + b"]" * 100_000
    first, second = inputs.from_jsonl(lines(deep + b"\n{}\n"))
    assert isinstance(first.error, InvalidArgument)
    assert "line 1" in first.error.message
    assert second.body == b"{}"


def test_a_csv_column_may_be_as_long_as_a_body() -> None:
    text = "x" * (4 << 20)
    [entry] = inputs.from_csv(lines(f"id,text\n1,{text}\n".encode()))
    assert entry.error is None
    assert entry.columns["text"] == text


def test_reading_is_counted_and_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    assert list(inputs.counted(lines(b"ab\nc"), sizes.append)) == [b"ab\n", b"c"]
    assert sizes == [3, 1]
    monkeypatch.setattr(inputs, "LINE_BYTES_MAX", 3)
    with pytest.raises(InvalidArgument, match="line 2"):
        list(inputs.counted(lines(b"ab\nabcdef\n"), sizes.append))
