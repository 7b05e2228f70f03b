import errno
import tempfile

import pytest

from duemq_analytics import __main__ as command
from duemq_analytics import temporary


@pytest.fixture
def left(tmp_path):
    """What a killed job has left."""
    path = tmp_path / "duemq-spark-left"
    (path / "blockmgr").mkdir(parents=True)
    (path / "blockmgr" / "rdd_0_0").write_bytes(b"large")
    (path / ".lock").touch()
    return path


def test_what_a_killed_job_has_left_goes_and_what_a_living_one_has_stays(tmp_path, left):
    begun = tmp_path / "duemq-spark-begun"
    begun.mkdir()
    with temporary.folder(tmp_path) as living:
        (living / "file").touch()
        assert not left.exists()
        with temporary.folder(tmp_path) as other:
            assert (living / "file").exists()
            assert begun.exists()
            assert other != living
        assert not other.exists()
    assert list(tmp_path.iterdir()) == [begun]


def test_nothing_is_taken_for_a_folder_of_ours_that_is_somebody_else_s(tmp_path, left, monkeypatch):
    monkeypatch.setattr(temporary.os, "geteuid", lambda: left.stat().st_uid + 1)
    elsewhere = tmp_path / "else" / "where"
    elsewhere.mkdir(parents=True)
    (elsewhere / ".lock").touch()
    (tmp_path / "duemq-spark-link").symlink_to(elsewhere)
    with temporary.folder(tmp_path):
        assert left.exists()
    monkeypatch.undo()
    with temporary.folder(tmp_path):
        assert not left.exists()
        assert (elsewhere / ".lock").exists()


def test_a_job_removes_what_a_killed_one_has_left(tmp_path, left, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert command.main(["report", "--lake", str(tmp_path), "--output", "x"]) == 2
    assert list(tmp_path.iterdir()) == []


def test_where_files_cannot_be_locked_a_folder_is_one_that_nobody_else_removes(
    tmp_path, monkeypatch
):
    """As of some network file systems, where a home may be."""

    def no_locks(file, how):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(temporary.fcntl, "flock", no_locks)
    with temporary.folder(tmp_path) as living:
        monkeypatch.undo()
        with temporary.folder(tmp_path):
            assert living.exists()
    assert list(tmp_path.iterdir()) == []
