"""The wheel's library loads, and uses only the C and C++ run-time libraries of this machine."""

from __future__ import annotations

import re
from pathlib import Path

import thinwire

RUN_TIME = re.compile(r"(ld-linux.*|lib(c|m|dl|rt|pthread|stdc\+\+|gcc_s))\.so")
LIBRARY = re.compile(r"/\S+\.so(\.\S+)?$", re.MULTILINE)


def loaded() -> set[Path]:
    return {Path(found[0]) for found in LIBRARY.finditer(Path("/proc/self/maps").read_text())}


before = loaded()  # Python's own
print("codecs run by", thinwire.simd_target())
ours = {file for file in loaded() - before if not RUN_TIME.match(file.name)}
home = Path(thinwire.__file__).parents[1]
strangers = {file for file in ours if home not in file.parents}
assert ours and not strangers, f"not from the wheel: {strangers or 'nothing was loaded'}"
# Python's ssl in the same process would get a libcrypto of ours, and may need a newer one.
assert not any("libcrypto" in file.name for file in ours), "libcrypto is linked in statically"
