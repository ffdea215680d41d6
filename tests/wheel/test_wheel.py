"""The metadata and the contents of wheels made by `make wheel`. THINWIRE_WHEELS names the files
(`make wheel-check`)."""

from __future__ import annotations

import os
import re
import zipfile
from pathlib import Path

import pytest

WHEELS = [Path(wheel) for wheel in os.environ.get("THINWIRE_WHEELS", "").split()]
pytestmark = pytest.mark.skipif(not WHEELS, reason="`make wheel-check` names wheels")


@pytest.fixture(params=WHEELS, ids=lambda wheel: wheel.name)
def wheel(request):
    with zipfile.ZipFile(request.param) as opened:
        yield opened


def read(wheel: zipfile.ZipFile, name: str) -> str:
    """A file of the wheel's .dist-info."""
    (found,) = (each for each in wheel.namelist() if each.endswith(f".dist-info/{name}"))
    return wheel.read(found).decode()


def test_the_tag_names_a_c_library(wheel):
    tags = re.findall(r"^Tag: (.*)", read(wheel, "WHEEL"), re.MULTILINE)
    assert tags and all(re.fullmatch(r"py3-none-manylinux_2_3\d_\w+", tag) for tag in tags), tags
    # torch asks for 2.28 itself; Debian 12 has 2.36, and no program built there needs a newer one.
    assert all(int(re.search(r"_2_(\d+)_", tag)[1]) <= 36 for tag in tags)


def test_c_programs_find_the_header_and_how_to_link(wheel):
    header = Path(__file__).resolve().parents[2] / "integrations/c/thinwire.h"
    assert wheel.read("thinwire/include/thinwire.h") == header.read_bytes()
    for file in ("cmake/thinwire/thinwireConfig.cmake", "pkgconfig/thinwire.pc"):
        assert f"thinwire/lib/{file}" in wheel.namelist()


def test_every_library_has_a_licence(wheel):
    rows = [row.split("\t") for row in read(wheel, "licenses/bundled/libraries.tsv").splitlines()]
    licences = dict(rows)
    bundled = {Path(n).name for n in wheel.namelist() if ".libs/" in n and ".so" in n}
    assert len(bundled) > 10 and bundled <= set(licences)
    assert set(licences) - bundled <= {"libcrypto.a", "libcudart_static.a"}
    for licence in set(licences.values()):
        text = read(wheel, f"licenses/bundled/{licence}")
        assert "copyright" in text.lower(), licence
        for common in re.findall(r"/usr/share/common-licenses/([\w.-]*\w)", text):
            assert len(read(wheel, f"licenses/bundled/{common}.txt")) > 1000
    assert "Apache License" in read(wheel, "licenses/LICENSE")
