import errno
import json
import os

import pytest

from duemq.errors import Corrupt, Rejected
from duemq_analytics.lake.commits import VERSION, Commits, lock


def test_a_commit_takes_the_place_of_its_name_s(tmp_path):
    commits = Commits(tmp_path / "c")
    assert commits.names() == []
    for value in (1, 2):
        commits.put("b", {"value": value})
    commits.put("a", {"value": 0})
    assert commits.names() == ["a", "b"]
    assert commits.get("b") == {"version": VERSION, "value": 2}
    commits.remove("b")
    commits.remove("b")
    assert [path.name for path in (tmp_path / "c").iterdir()] == ["a.json"]


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"version": "x"}'])
def test_what_is_no_commit_is_named(tmp_path, text):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(Corrupt, match=r"a\.json is no commit"):
        Commits(tmp_path).get("a")


def test_a_newer_version_is_refused(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps({"version": VERSION + 1}))
    with pytest.raises(Corrupt, match="a newer duemq-analytics wrote it"):
        Commits(tmp_path).get("a")


def test_one_job_at_a_time(tmp_path):
    with lock(tmp_path, "landing"):
        with lock(tmp_path, "compacting"):
            pass
        with pytest.raises(Rejected, match="another process is landing"), lock(tmp_path, "landing"):
            pass
    with lock(tmp_path, "landing"):
        pass


def test_a_commit_that_finds_a_full_disk_leaves_the_one_before_and_nothing_else(
    tmp_path, monkeypatch
):
    commits = Commits(tmp_path)
    commits.put("a", {"value": 1})

    def full(handle):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        commits.put("a", {"value": 2})
    assert commits.get("a")["value"] == 1
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]
