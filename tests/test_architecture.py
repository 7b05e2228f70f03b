"""The rules of the house that a machine can check."""

import ast
import dataclasses
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from duemq import errors
from duemq.rpc import status

ROOT = Path(__file__).resolve().parent.parent
SERVICES = ("nameserver", "broker", "timer_service")
# Modules that may know gRPC, asyncio, a clock.  Every other one is a core: plain Python.
SHELLS = {
    "nameserver": {"__main__", "clock", "loops", "metrics", "servicer", "settings"},
    "broker": {
        "__main__",
        "admin_servicer",
        "commits",
        "group_admin_servicer",
        "group_servicer",
        "groups",
        "key_indexer",
        "loops",
        "message_admin_servicer",
        "metrics",
        "process",
        "pull_stream",
        "puller",
        "rebalancer",
        "send_back_service",
        "sender",
        "servicer",
        "settings",
        "timer_servicer",
        "upkeep",
    },
    "timer_service": {
        "__main__",
        "cancels",
        "fetcher",
        "links",
        "metrics",
        "process",
        "sender",
        "servicer",
        "settings",
        "shard",
    },
}
PURE_SDK = (
    "balance",
    "consumer.failure_log",
    "consumer.lanes",
    "consumer.outcomes",
    "consumer.stalls",
    "due",
    "errors",
    "group_topics",
    "moments",
    "pieces",
    "process_queue",
    "retry_policy",
    "route",
    "sql",
    "tag_filter",
)
FORBIDDEN_IN_CORES = ("grpc", "asyncio", "google.protobuf", "duemq.v1", "duemq.rpc")
CLOCKS = {
    "time",
    "time_ns",
    "monotonic",
    "monotonic_ns",
    "perf_counter",
    "perf_counter_ns",
    "sleep",
}


def cores():
    for package in SERVICES:
        for file in sorted((ROOT / package).glob("*.py")):
            if file.stem not in SHELLS[package] and file.stem != "__init__":
                yield f"{package}.{file.stem}"
    for file in sorted((ROOT / "storage").glob("*.py")):
        # The writer is a thread.
        if file.stem not in {"__init__", "__main__", "writer"}:
            yield f"storage.{file.stem}"
    for module in PURE_SDK:
        yield f"duemq.{module}"


def source(module):
    base = ROOT / "sdk" if module.startswith("duemq.") else ROOT
    return (base / module.replace(".", "/")).with_suffix(".py")


def calls_of(tree, module, names):
    """Lines where `module.name()` is called, or `name` is imported from it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner = node.func.value
            if isinstance(owner, ast.Name) and owner.id == module and node.func.attr in names:
                yield node.lineno
        if isinstance(node, ast.ImportFrom) and node.module == module:
            yield from [node.lineno for alias in node.names if alias.name in names]


def test_the_import_contracts_hold():
    code = "from importlinter.cli import lint_imports_command as main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_cores_load_without_grpc_and_asyncio():
    code = "\n".join(
        [
            "import importlib, sys",
            "for name in sys.argv[1:]:",
            "    importlib.import_module(name)",
            f"    found = [m for m in {FORBIDDEN_IN_CORES!r} if m in sys.modules]",
            "    assert not found, f'{name} loads {found}'",
        ]
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *cores()],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("module", list(cores()))
def test_cores_have_no_clock(module):
    found = list(calls_of(ast.parse(source(module).read_text()), "time", CLOCKS))
    assert not found, f"{module}, lines {found}: take now_ms instead"


def test_tests_without_processes_do_not_sleep():
    for folder in ("unit", "property", "golden"):
        for file in (ROOT / "tests" / folder).rglob("*.py"):
            tree = ast.parse(file.read_text())
            found = [*calls_of(tree, "time", {"sleep"}), *calls_of(tree, "asyncio", {"sleep"})]
            assert not found, f"{file.relative_to(ROOT)}, lines {found}: pass a time instead"


def test_the_bare_sdk_needs_four_distributions():
    allowed = {"grpc", "google", "tenacity", "opentelemetry", "duemq"} | sys.stdlib_module_names
    extras = {"cli", "embedded", "telemetry"}
    servers_only = {"rpc/server.py", "rpc/metrics.py", "rpc/logging.py"}
    package = ROOT / "sdk" / "duemq"
    for file in package.rglob("*.py"):
        path = file.relative_to(package)
        if path.parts[0] in extras or path.as_posix() in servers_only:
            continue
        for node in ast.parse(file.read_text()).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module]
            foreign = [name for name in names if name.partition(".")[0] not in allowed]
            assert not foreign, f"{path} imports {foreign}"


def test_importing_the_sdk_is_light():
    code = (
        "import sys, duemq, duemq.errors\n"
        "assert 'grpc' not in sys.modules, 'import duemq must stay lazy'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_who_sends_or_administers_does_not_load_what_consumes():
    code = (
        "import sys, duemq\n"
        "duemq.Producer, duemq.Admin, duemq.aio.Producer, duemq.aio.Admin\n"
        "found = [m for m in sys.modules if m.startswith('duemq.consumer.p')]\n"
        "assert not found, found"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_error_class_travels():
    def below(kind):
        for one in kind.__subclasses__():
            yield one
            yield from below(one)

    for kind in below(errors.DuemqError):
        if kind is not errors.Closed and kind.__module__.startswith("duemq."):
            assert status.status_of(kind("m")) is not None
        if "code" in vars(kind):
            assert kind in status.STATUSES


def test_the_wire_rules_show_the_table_of_errors():
    text = (ROOT / "protos" / "README.md").read_text()
    rows = re.findall(r"^\| ([A-Z_, ]+) \| ([A-Z_]+) \| (yes|no) \|$", text, re.MULTILINE)
    shown = {name: row[1:] for row in rows for name in row[0].split(", ")}
    assert shown == {
        kind.code.name: (code.name, "yes" if kind("m").retryable else "no")
        for kind, code in status.STATUSES.items()
    }


@pytest.mark.parametrize("package", SERVICES)
def test_every_setting_says_what_it_is(package):
    for field in dataclasses.fields(import_module(f"{package}.settings").Settings):
        assert field.metadata.get("help"), f"{package}: {field.name}"


def test_generated_code_is_marked():
    for file in (ROOT / "sdk" / "duemq" / "v1").glob("*_pb2*.py*"):
        assert file.read_text().startswith("# Generated by `make proto`."), file.name
    assert "sdk/duemq/v1" in (ROOT / ".gitattributes").read_text()


def test_only_settings_read_the_environment():
    settings = {"sdk/duemq/rpc/settings.py", "sdk/duemq/settings.py"}
    sets_what_grpc_reads = {"sdk/duemq/__init__.py", "sdk/duemq/tuning.py"}
    allowed = settings | sets_what_grpc_reads
    for package in (*SERVICES, "storage", "sdk/duemq"):
        for file in (ROOT / package).rglob("*.py"):
            path = file.relative_to(ROOT).as_posix()
            if path in allowed or path.startswith(
                ("sdk/duemq/cli/", "sdk/duemq/embedded/", "sdk/duemq/telemetry/")
            ):
                continue
            assert "os.environ" not in file.read_text(), f"{path} reads the environment"
