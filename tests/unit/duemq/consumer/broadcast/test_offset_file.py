import json
import os

import pytest

from duemq.consumer.broadcast.offset_file import Kept, OffsetFile
from duemq.errors import Corrupt, InvalidArgument
from duemq.protocol.balance import MessageQueue

A0 = MessageQueue("orders", "a", 0)
B3 = MessageQueue("orders", "b", 3)


@pytest.fixture
def file(tmp_path):
    made = OffsetFile(str(tmp_path), "billing", "pod-1")
    yield made
    made.close()


def test_a_new_member_has_none(file, tmp_path):
    assert file.open() is None
    assert file.path == tmp_path / "billing" / "pod-1.json"
    assert not file.path.exists()


def test_what_was_saved_last_is_found(file):
    file.open()
    file.save(["orders"], {A0: 7}, {})
    file.save(["orders", "stock"], {A0: 8, B3: 0}, {A0: 1 << 40})
    file.close()
    assert file.open() == Kept(frozenset({"orders", "stock"}), {A0: 8, B3: 0}, {A0: 1 << 40})
    assert sorted(path.suffix for path in file.path.parent.iterdir()) == [".json", ".lock"]


def test_what_a_crash_left_beside_the_file_is_of_no_interest(file):
    file.open()
    file.save(["orders"], {A0: 7}, {})
    file.path.with_suffix(".tmp").write_text('{"half')
    file.close()
    assert file.open() == Kept(frozenset({"orders"}), {A0: 7}, {})
    file.save(["orders"], {A0: 9}, {})
    file.close()
    assert file.open().offsets == {A0: 9}


def test_what_an_older_version_saved_is_read(file):
    file.open()
    file.save(["orders"], {A0: 7}, {A0: 3})
    content = json.loads(file.path.read_text())
    del content["topic_ids"]
    file.path.write_text(json.dumps(content))
    file.close()
    assert file.open() == Kept(frozenset({"orders"}), {A0: 7}, {})


@pytest.mark.parametrize("part", ["queues", "topic_ids"])
@pytest.mark.parametrize(
    "content",
    [
        "",
        "not JSON",
        "[]",
        "{}",
        '{"format": "another", "version": 1}',
        '{"format": "duemq-broadcast-offsets", "version": 2}',
        b"\xff\xfe",
        [["orders", "a", 0]],
        [["orders", "a", 0, "7"]],
        [["orders", "a", 0, -1]],
        [["orders", "a", 0, 1 << 64]],
        [["orders", "a", True, 1]],
        [["orders", "a", 1 << 31, 1]],
        [["orders", 1, 0, 1]],
    ],
)
def test_a_damaged_file_is_an_error_that_names_it_and_stays(file, content, part):
    file.open()
    file.save(["orders"], {A0: 7}, {})
    if isinstance(content, list):
        content = json.dumps({**json.loads(file.path.read_text()), part: content})
    file.path.write_bytes(content if isinstance(content, bytes) else content.encode())
    file.close()
    before = file.path.read_bytes()
    with pytest.raises(Corrupt) as raised:
        file.open()
    assert str(file.path) in raised.value.message
    assert raised.value.field == "offsets_dir"
    assert file.path.read_bytes() == before


def test_the_file_of_another_member_is_an_error_that_names_both(file, tmp_path):
    file.open()
    file.save(["orders"], {A0: 7}, {})
    other = OffsetFile(str(tmp_path), "billing", "pod-2")
    other.path.write_bytes(file.path.read_bytes())
    with pytest.raises(InvalidArgument) as raised:
        other.open()
    other.close()
    for part in (str(other.path), "'pod-1'"):
        assert part in raised.value.message


def test_one_process_a_member(file, tmp_path):
    file.open()
    second = OffsetFile(str(tmp_path), "billing", "pod-1")
    with pytest.raises(InvalidArgument) as raised:
        second.open()
    assert (raised.value.field, raised.value.value) == ("member_name", "pod-1")
    assert str(file.path.with_suffix(".lock")) in raised.value.message
    file.close()
    assert second.open() is None
    second.close()


def test_a_child_that_was_forked_meanwhile_does_not_keep_the_name(file, tmp_path):
    file.open()
    inherited = os.dup(file._lock)
    file.close()
    again = OffsetFile(str(tmp_path), "billing", "pod-1")
    try:
        assert again.open() is None
    finally:
        again.close()
        os.close(inherited)


def test_names_that_file_systems_do_not_take_are_escaped(tmp_path):
    file = OffsetFile(str(tmp_path), "a/b", "käse:1")
    file.open()
    file.save([], {}, {})
    file.close()
    assert file.path.parent.parent == tmp_path
    assert file.open() == Kept(frozenset(), {}, {})
    file.close()


@pytest.mark.parametrize("name", ["", "..", ".", "x" * 300, "ä" * 60])
def test_names_that_cannot_be_files_are_refused(tmp_path, name):
    with pytest.raises(InvalidArgument) as raised:
        OffsetFile(str(tmp_path), "billing", name)
    assert raised.value.field == "member_name"


def test_without_a_directory_it_is_in_the_home(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    file = OffsetFile("", "billing", "pod-1")
    assert file.path == tmp_path / ".duemq" / "offsets" / "billing" / "pod-1.json"
