"""Finds the libnccl that a machine's torch uses, for scripts/gpu_run.sh.

    python3 nccl.py FILE

Writes "VERSION PATH" to FILE, and prints it. The copy is the one that THINWIRE_NCCL_LIB names, else
the one that torch has loaded, else that of the wheel nvidia-nccl, else the dynamic linker's. Two
copies do not work in one process, so the tests must use this one.

Exit 0: found, or the last line begins with "absent" because this torch has no CUDA. Exit 1: torch
has CUDA, but no working NCCL was found: an error of the machine or of the search."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path

FILE_NAME = "libnccl.so.2"


def loaded_copy() -> str | None:
    """The path of the libnccl that this process has loaded."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        *_, path = line.split(maxsplit=5)
        if Path(path).name.startswith(FILE_NAME):
            return path
    return None


def copy_of_wheel() -> str | None:
    """The path of the libnccl in the wheel nvidia-nccl-cu12, -cu13 and so on."""
    for wheel in importlib.metadata.distributions():
        if not (wheel.metadata["Name"] or "").startswith("nvidia-nccl"):
            continue
        for file in wheel.files or ():
            path = Path(str(wheel.locate_file(file)))
            if path.name == FILE_NAME and path.is_file():
                return str(path)
    return None


def main(target: str) -> int:
    import torch  # first: it loads the copy that everything else must use
    from thinwire import _library, config, errors

    cuda = torch.version.cuda
    if cuda is None:
        print(f"absent: torch {torch.__version__} is built without CUDA")
        return 0
    found = config.nccl_library() or loaded_copy() or copy_of_wheel()
    try:
        version = _library.nccl_version(found)
    except errors.UnavailableError as error:
        print(f"torch is built for CUDA {cuda}, but {error}")
        return 1
    # The path of the linker's copy is known once it is loaded.
    line = f"{version} {found or loaded_copy()}"
    Path(target).write_text(line)
    print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
