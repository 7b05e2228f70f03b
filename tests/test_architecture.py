"""The rules of the house that a machine can check."""

import ast
import dataclasses
import re
import subprocess
import sys
import tomllib
from collections import Counter
from importlib import import_module
from pathlib import Path

import pytest

from duemq import errors
from duemq.transport import status

ROOT = Path(__file__).resolve().parent.parent
SERVICES = ("nameserver", "broker", "timer_service")
# Folders of cores: plain Python.  That they load no gRPC and no asyncio say the import contracts.
CORES = (
    *(
        f"broker/{each}"
        for each in (
            "filtering",
            "groups",
            "reading",
            "records",
            "store",
            "store/changes",
            "store/keys",
        )
    ),
    *(
        f"timer_service/{each}"
        for each in (
            "disk",
            "disk/snapshots",
            "far",
            "scheduling",
            "scheduling/bulk",
            "scheduling/holding",
            "scheduling/keyed",
            "scheduling/schedules",
            "timers",
            "views",
        )
    ),
    "replication/protocol",
    *("storage", "storage/indexes", "storage/log_parts", "storage/replicas", "storage/tools"),
    *("sdk/duemq/protocol", "sdk/duemq/producing/pumping"),
)
# Cores that stand beside what runs them.
CORE_FILES = (
    *(f"sdk/duemq/consumer/delivery/{each}.py" for each in ("failure_log", "order_lanes")),
    "sdk/duemq/consumer/fetching/process_queue.py",
    *(f"sdk/duemq/consumer/group/{each}.py" for each in ("holdings", "standing")),
    *(f"sdk/duemq/producing/{each}.py" for each in ("batch", "batch_encoding", "outbox")),
    *(
        f"recurring/duemq_recurring/{each}.py"
        for each in ("cron", "moves", "occurrences", "schedule", "schedules", "steps", "wall_clock")
    ),
)
FILES_IN_A_FOLDER_MAX = 16
# Names of classes that several have: a blocking and an asyncio face, each service's settings.
FACES = ("Admin", "MemoryCluster", "Producer", "PullConsumer", "PushConsumer", "Settings")
TOPS = (
    *SERVICES,
    "replication",
    "storage",
    "serving",
    "local_cluster",
    "operating",
    "bench",
    "demo",
    "sdk",
    "recurring",
    "cli",
)
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
    """Their files; storage/writer.py is a thread."""
    for folder in CORES:
        yield from sorted(set((ROOT / folder).glob("*.py")) - {ROOT / "storage" / "writer.py"})
    yield from (ROOT / file for file in CORE_FILES)


def calls_of(tree, module, names):
    """Lines where `module.name()` is called, or `name` is imported from it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            owner = node.func.value
            if isinstance(owner, ast.Name) and owner.id == module and node.func.attr in names:
                yield node.lineno
        if isinstance(node, ast.ImportFrom) and node.module == module:
            yield from [node.lineno for alias in node.names if alias.name in names]


def tracked(top):
    """Modules below a folder, without what a build has left behind."""
    listed = subprocess.run(("git", "ls-files", "-z", top), cwd=ROOT, capture_output=True)
    return [Path(name) for name in listed.stdout.decode().split("\0") if name.endswith(".py")]


def test_the_import_contracts_hold():
    code = "from importlinter.cli import lint_imports_command as main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_core_is_named_in_a_contract():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    named = {
        module
        for each in contracts["contracts"]
        if each["name"].startswith("cores")
        for module in each["source_modules"]
    }
    for folder in (*CORES, *CORE_FILES):
        top, _, below = folder.partition("/")
        name = below if top in ("sdk", "recurring") else f"duemq_server/{folder}"
        parts = name.removesuffix(".py").split("/")
        above = {".".join(parts[:end]) for end in range(1, len(parts) + 1)}
        assert above & named, folder


@pytest.mark.parametrize("file", list(cores()), ids=lambda file: str(file.relative_to(ROOT)))
def test_cores_have_no_clock(file):
    found = list(calls_of(ast.parse(file.read_text()), "time", CLOCKS))
    assert not found, f"{file}, lines {found}: take now_ms instead"


def test_no_folder_is_a_heap():
    counts = Counter(str(file.parent) for top in TOPS for file in tracked(top))
    assert counts["broker"]
    del counts["sdk/duemq/v1"]
    assert not {folder: n for folder, n in counts.items() if n > FILES_IN_A_FOLDER_MAX}


def test_a_name_means_one_thing():
    """A class has its name alone in a package, and shares it with one in another at most."""
    places = {}
    for top in (*TOPS, "trace_analytics"):
        for file in tracked(top):
            for node in ast.walk(ast.parse((ROOT / file).read_text("utf-8"))):
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    places.setdefault(node.name, []).append(top)
    for name in FACES:
        places.pop(name)
    assert places.pop("Broker") == ["broker", "sdk"]
    assert not {k: v for k, v in places.items() if len(v) > 2 or len(set(v)) < len(v)}


def test_whoever_connects_says_with_which_certificates():
    """Forgotten, a connection would be one without TLS, and fail only in a cluster with it."""
    for top in (*TOPS, "trace_analytics"):
        for file in (ROOT / top).rglob("*.py"):
            calls = (node for node in ast.walk(ast.parse(file.read_text())) if _connects(node))
            found = [each.lineno for each in calls if len(each.args) + len(each.keywords) < 2]
            assert not found, f"{file.relative_to(ROOT)}, lines {found}: name tls"


def _connects(node):
    """A call of duemq.transport.channel that makes one."""
    if not isinstance(node, ast.Call):
        return False
    name = ast.unparse(node.func)
    return name in {"channel.connect", "channel.connect_to_nameserver"}


def test_tests_without_processes_do_not_sleep():
    for folder in ("unit", "property", "golden", "simulation"):
        for file in (ROOT / "tests" / folder).rglob("*.py"):
            tree = ast.parse(file.read_text())
            found = [*calls_of(tree, "time", {"sleep"}), *calls_of(tree, "asyncio", {"sleep"})]
            assert not found, f"{file.relative_to(ROOT)}, lines {found}: pass a time instead"


def test_the_bare_sdk_needs_four_distributions():
    allowed = {"grpc", "google", "tenacity", "opentelemetry", "duemq"} | sys.stdlib_module_names
    package = ROOT / "sdk" / "duemq"
    for file in package.rglob("*.py"):
        path = file.relative_to(package)
        if path.parts[0] == "telemetry":
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
    for field in dataclasses.fields(import_module(f"duemq_server.{package}.settings").Settings):
        assert field.metadata.get("help"), f"{package}: {field.name}"


def test_generated_code_is_marked():
    for folder in ("sdk/duemq/v1", "replication/running/v1", "replication/stores/etcd_v3"):
        files = list((ROOT / folder).glob("*_pb2*.py*"))
        assert files
        for file in files:
            assert file.read_text().startswith("# Generated by `make proto`."), file.name
        assert folder in (ROOT / ".gitattributes").read_text()


def test_only_settings_read_the_environment():
    allowed = {
        "serving/settings.py",
        "sdk/duemq/settings.py",
        # What gRPC reads is set there.
        "sdk/duemq/__init__.py",
        "sdk/duemq/transport/tuning.py",
    }
    for top in (*SERVICES, "replication", "storage", "serving", "sdk/duemq"):
        for file in (ROOT / top).rglob("*.py"):
            path = file.relative_to(ROOT).as_posix()
            if path not in allowed and not path.startswith("sdk/duemq/telemetry/"):
                assert "os.environ" not in file.read_text(), f"{path} reads the environment"


# Starts Java, which imports nothing.
NO_PYTHON = {"trace_analytics/duemq_analytics/session.py"}


def test_whoever_starts_a_child_says_what_it_inherits():
    """Children must not import from the current folder: `duemq_server.local_cluster.safe_path`."""
    names = {"Popen", "run", "call", "check_call", "check_output"}
    for top in (*TOPS, "trace_analytics"):
        for file in (ROOT / top).rglob("*.py"):
            if str(file.relative_to(ROOT)) in NO_PYTHON or "examples" in file.parts:
                continue
            for node in ast.walk(ast.parse(file.read_text())):
                if (
                    isinstance(node, ast.Call)
                    and isinstance(node.func, ast.Attribute)
                    and isinstance(node.func.value, ast.Name)
                    and node.func.value.id == "subprocess"
                    and node.func.attr in names
                ):
                    given = {keyword.arg for keyword in node.keywords}
                    assert "env" in given, f"{file}, line {node.lineno}: env="
