"""A file of permissions is checked and shown before a service reads it."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from duemq_cli.session import Session
from duemq_server.operating.permissions_command import permissions

TEXT = """
[[allow]]
names = ["cluster"]
service = true

[[allow]]
names = ["shop", "store"]
send = ["orders", "invoices*"]
groups = ["shop"]

[[allow]]
names = ["*"]
receive = ["news"]
"""
SHOPS = ["shop", "store"]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "permissions.toml"
    path.write_text(TEXT)
    return path


def shown(file: Path, *arguments: str) -> list[list[object]]:
    told = CliRunner().invoke(permissions, [str(file), *arguments, "--json"], obj=Session())
    assert told.exit_code == 0, told.output
    rows = map(json.loads, told.output.splitlines())
    return [[row["names"], row["right"], row["of"]] for row in rows]


def test_all_is_shown_or_what_one_may(file):
    of_shop: list[list[object]] = [
        [SHOPS, "send", ["orders", "invoices*"]],
        [SHOPS, "groups", ["shop"]],
    ]
    of_all: list[object] = [["*"], "receive", ["news"]]
    assert shown(file) == [[["cluster"], "service", ["*"]], *of_shop, of_all]
    assert shown(file, "--name", "store") == [*of_shop, of_all]
    assert shown(file, "--name", "stranger") == [of_all]


def test_people_read_a_table(file):
    told = CliRunner().invoke(permissions, [str(file), "--name", "shop"], obj=Session())
    assert "orders, invoices*" in told.output
    assert "cluster" not in told.output
