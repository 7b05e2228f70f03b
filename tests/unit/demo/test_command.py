import pytest

from duemq.errors import InvalidArgument
from duemq_server.demo.command import _clear


@pytest.fixture
def output(tmp_path):
    for name in ("cluster", "report", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "kept").touch()
    return tmp_path


def test_what_an_earlier_run_left_is_removed(output):
    (output / "demo.log").touch()
    _clear(output, output / "demo.log")
    assert sorted(each.name for each in output.iterdir()) == ["demo.log", "other"]


def test_folders_that_no_run_has_left_stay(output):
    with pytest.raises(InvalidArgument, match=r"output: .* no run has left .*/cluster"):
        _clear(output, output / "demo.log")
    assert (output / "cluster" / "kept").exists()


def test_a_new_folder_is_made(tmp_path):
    _clear(tmp_path / "a" / "b", tmp_path / "a" / "b" / "demo.log")
    assert (tmp_path / "a" / "b").is_dir()
