import platform
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

CHART = Path(__file__).resolve().parents[2] / "helm" / "duemq"
HELM = Path(sys.prefix) / "helm"
VALUES = ["default", "minimal", "full", "replicated", "replicated-etcd", "traces", "tls"]
VALUES += ["external", "external-replicated"]


class Helm:
    """A real Helm of one version."""

    def __init__(self, binary):
        self.binary = binary

    def run(self, *arguments, **options):
        command = [self.binary, *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, check=False, **options)

    def template(self, values="default", overrides=None, release="test", arguments=()):
        """The rendered objects."""
        command = ["template", release, CHART, "--namespace", "messages", *arguments]
        if values != "default":
            command += ["--values", CHART / "ci" / f"{values}-values.yaml"]
        if overrides is not None:
            command += ["--values", "-"]
        done = self.run(*command, input=yaml.dump(overrides or {}, Dumper=Dumper))
        if done.returncode:
            raise RefusedValuesError(done.stderr)
        return [one for one in yaml.load_all(done.stdout, Loader) if one]


class Dumper(yaml.SafeDumper):
    """Quotes every text: `N` is one for PyYAML and a boolean for Helm."""


Dumper.add_representer(
    str, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"')
)


class Loader(yaml.SafeLoader):
    """Reads `=` as the text that it is, as Kubernetes does; YAML 1.1 had a type for it."""


Loader.add_constructor("tag:yaml.org,2002:value", yaml.SafeLoader.construct_yaml_str)


class RefusedValuesError(Exception):
    """Helm does not render these values."""


def find(name):
    if platform.machine() != "x86_64":
        pytest.skip("the package index has Helm for x86_64 only")
    binary = HELM / name
    assert binary.exists(), "no Helm: run `make setup`"
    return Helm(binary)


@pytest.fixture(scope="session", params=[pytest.param("helm3", marks=pytest.mark.long), "helm4"])
def helm(request):
    return find(request.param)


@pytest.fixture(scope="session")
def helm4():
    return find("helm4")


@pytest.fixture(scope="session", params=VALUES)
def objects(request, helm):
    return helm.template(request.param)
