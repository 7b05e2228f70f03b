"""An authority and certificates of it, made by openssl."""

import shutil
import subprocess
from pathlib import Path

import pytest

from duemq.settings import Tls

needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="makes the certificates")
_NEW = ("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")


def openssl(*arguments: str | Path) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)


def authority(folder: Path, name: str = "ca") -> Path:
    """NAME.pem and NAME.key in the folder; answers the first."""
    certificate = folder / f"{name}.pem"
    openssl(
        *(*_NEW, "-x509", "-days", "2", "-subj", f"/CN={name}"),
        *("-keyout", folder / f"{name}.key", "-out", certificate),
    )
    return certificate


def certificate(ca: Path, name: str, *, san: str = "IP:127.0.0.1") -> Tls:
    """NAME.pem and NAME.key beside those of the authority, made anew if they are there."""
    folder = ca.parent
    pem, key = folder / f"{name}.pem", folder / f"{name}.key"
    request, extensions = folder / f"{name}.csr", folder / f"{name}.extensions"
    extensions.write_text(f"subjectAltName={san}\n")
    new_key, new_pem = folder / f"{name}.new.key", folder / f"{name}.new.pem"
    openssl(*_NEW, "-subj", f"/CN={name}", "-keyout", new_key, "-out", request)
    openssl(
        *("x509", "-req", "-days", "2", "-in", request, "-extfile", extensions),
        *("-CA", ca, "-CAkey", ca.with_suffix(".key"), "-CAcreateserial", "-out", new_pem),
    )
    new_key.replace(key)
    new_pem.replace(pem)
    return Tls(ca=str(ca), cert=str(pem), key=str(key))
