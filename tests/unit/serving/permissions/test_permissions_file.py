"""The file is read at the start and when it changes; what is of no use changes nothing."""

import os

import pytest

from duemq.errors import InvalidArgument
from duemq_server.serving.permissions import permissions_file
from duemq_server.serving.permissions.permissions_file import LOOK_S, PermissionsFile
from duemq_server.serving.permissions.rights import Action, Need

TEXT = '[[allow]]\nnames = ["{}"]\nservice = true\n'


class Watched:
    """A file of permissions, and the clock of who reads it."""

    def __init__(self, path):
        self.path, self.now_s = path, 100.0
        self.write("one")
        self.file = PermissionsFile(str(path), lambda: self.now_s)

    def write(self, name):
        new = self.path.with_suffix(".new")
        new.write_text(TEXT.format(name))
        os.replace(new, self.path)  # another file: its stamp differs, however fast this is

    def served_by(self, *names):
        return [
            name for name in names if self.file.policy().allows((name,), Need(Action.SERVE, ""))
        ]


@pytest.fixture
def watched(tmp_path):
    return Watched(tmp_path / "permissions.toml")


def test_a_change_counts_when_it_was_looked_for(watched):
    watched.write("two")
    assert watched.served_by("one", "two") == ["one"]
    watched.now_s += LOOK_S
    assert watched.served_by("one", "two") == ["two"]


def test_what_is_of_no_use_leaves_the_one_of_before(watched, caplog):
    for broken in (lambda: watched.path.write_text("[[allow"), watched.path.unlink):
        broken()
        watched.now_s += LOOK_S
        assert watched.served_by("one", "two") == ["one"]
        assert "the permissions of before stay in use" in caplog.text
        caplog.clear()
        watched.now_s += LOOK_S
        assert watched.served_by("one") == ["one"]
        assert not caplog.text  # said once
    watched.write("two")
    watched.now_s += LOOK_S
    assert watched.served_by("one", "two") == ["two"]


def test_what_could_not_be_read_is_read_when_it_can(watched, monkeypatch):
    def refused(*_, **__):
        raise PermissionError(13, "Permission denied")

    watched.write("two")
    with monkeypatch.context() as patched:
        patched.setattr(permissions_file, "open", refused, raising=False)
        watched.now_s += LOOK_S
        assert watched.served_by("one", "two") == ["one"]
    watched.now_s += LOOK_S
    assert watched.served_by("one", "two") == ["two"]


@pytest.mark.parametrize("content", [None, b"\xff", b"[[allow"])
def test_a_start_without_one_of_use_is_refused(tmp_path, content):
    path = tmp_path / "permissions.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InvalidArgument) as caught:
        PermissionsFile(str(path))
    assert caught.value.field == "permissions"
