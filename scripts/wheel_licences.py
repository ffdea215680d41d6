"""Adds the licences of the libraries in a wheel to the wheel.

    wheel_licences.py WHEEL

auditwheel has put Debian's libraries into thinwire.libs/. For each, the copyright file of its
Debian package is copied to the wheel's licenses/bundled/, with the texts that the file names in
common-licenses. licenses/bundled/libraries.tsv lists each library, also those that are linked
statically, with its file. Raises RuntimeError for a library without a licence."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

DOCUMENTS, COMMON = Path("/usr/share/doc"), Path("/usr/share/common-licenses")
STATIC = {"libcrypto.a": "libssl-dev"}
# A build with CUDA adds NVIDIA's runtime, whose terms are in no Debian package.
CUDA = "libthinwire_cuda.so"
CUDA_TERMS = """libthinwire_cuda.so contains NVIDIA's CUDA runtime (libcudart_static.a), which may
be redistributed as part of an application: CUDA Toolkit End User License Agreement, attachment A,
https://docs.nvidia.com/cuda/eula/. Copyright NVIDIA Corporation.
"""


def soname(file: str) -> str:
    """The name that a library had before auditwheel: libgloo-0a1b2c3d.so.0 was libgloo.so.0."""
    return re.sub(r"-[0-9a-f]{8,}(?=\.so)", "", file)


def package_of(library: str) -> str:
    """The Debian package of a library: the same name on every architecture."""
    found = subprocess.run(
        ["dpkg", "-S", f"*/{library}"], capture_output=True, text=True, check=False
    )
    packages = {line.split(":")[0] for line in found.stdout.splitlines()}
    if len(packages) != 1:
        raise RuntimeError(f"{library}: expected one package of Debian's, got {packages or 'none'}")
    return packages.pop()


def add_licence(package: str, folder: Path) -> str:
    """Write the package's licence and the texts that it names; return the licence's file name."""
    text = (DOCUMENTS / package / "copyright").read_text()
    name = f"{package}.txt"
    (folder / name).write_text(text)
    for common in set(re.findall(rf"{COMMON}/([\w.-]*\w)", text)):
        (folder / f"{common}.txt").write_text((COMMON / common).read_text())
    return name


def add_licences(root: Path) -> None:
    """root: the folder of an unpacked wheel."""
    (information,) = root.glob("*.dist-info")
    folder = information / "licenses" / "bundled"
    folder.mkdir(parents=True)
    packages = {file.name: package_of(soname(file.name)) for file in root.glob("*.libs/*.so*")}
    rows = {file: add_licence(package, folder) for file, package in (packages | STATIC).items()}
    if any(root.glob(f"*/lib/{CUDA}")):
        (folder / "cuda.txt").write_text(CUDA_TERMS)
        rows["libcudart_static.a"] = "cuda.txt"
    table = "".join(f"{file}\t{licence}\n" for file, licence in sorted(rows.items()))
    (folder / "libraries.tsv").write_text(table)


def main(wheel: Path) -> None:
    tool = [sys.executable, "-m", "wheel"]
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([*tool, "unpack", "-d", folder, wheel], check=True, capture_output=True)
        (root,) = Path(folder).iterdir()
        add_licences(root)
        subprocess.run([*tool, "pack", "-d", wheel.parent, root], check=True, capture_output=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
