"""kernels/sass.md: what the machine code of each kernel costs, counted and not run.

    scripts/sass_table.py [--check kernels/sass.md] [build/integrations/c/libthinwire_cuda.so]

Prints the tables; with --check prints the rows that have become worse, and exits with 1 if there
are any. cuobjdump and nvdisasm come from PATH, or from the wheels nvidia-cuda-cuobjdump and
nvidia-cuda-nvdisasm.

A thread has 16 elements of a tile. `path` counts the instructions that it executes for them in a
full, aligned tile of finite values, with blocks of 256, one job in the launch, feedback and no
momentum (sass_path.py). A reduction has the wires of eight ranks. For topk, whose path depends on
the values, only the size is counted.
`issue` is the share of a multiprocessor's four schedulers that `path` takes while memory runs at
its full rate. The rows are the kernels for f32 on one architecture. No kernel may spill registers,
for any dtype and on any architecture in the library."""

from __future__ import annotations

import argparse
import os
import pathlib
import re
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass

from sass_path import Code, path_length

ROOT = pathlib.Path(__file__).resolve().parent.parent
ARCHITECTURE = "sm_90"
# 4.3 TB/s, measured for copies on an H200, divided by 132 multiprocessors of 1.98 GHz.
BYTES_PER_CLOCK = 16.45
BITS = {
    "Fp32": 32, "Bf16": 16, "Int8": 8.0625, "Int4": 4.0625, "OneBit": 1.0625, "Adaptive": 2.0625
}  # fmt: skip
RANKS = 8  # in a reduction
# Floats that are read and written for each element, in addition to the codes.
FLOATS = {
    "reduce": 4,
    "encode_ef": 3, "encode_heads": 3, "encode_codes": 2, "decode": 1, "decode_add": 2,
    "accumulate": 3,
}  # fmt: skip
# Kernels of codecs with widths (kernels/cuda_widths.cu): their names do not contain the codec's.
WIDTHS = {
    "Plan": "plan", "EncodeHeads": "encode_heads", "EncodeCodes": "encode_codes",
    "DecodeWidths": "decode",
}  # fmt: skip
VARIANT = r"NS0_7VariantINS_6codecs\d+([A-Za-z]+?\d*)ELb([01])EEE"
GROWTH = 1.1
F32 = "0"


@dataclass
class Row:
    name: str
    path: int  # 0: not walked
    size: int
    registers: int

    def issue(self) -> float:
        """A reduction reads the wires of all ranks but its own, and writes one."""
        operation, *codecs = re.sub(":hadamard=1| to", "", self.name).split()
        bits = [BITS[codec] for codec in codecs] or [0]
        wires = (RANKS - 1) * bits[0] + bits[-1] if operation == "reduce" else bits[0]
        moved = 4 * FLOATS[operation] + wires / 8
        return self.path * BYTES_PER_CLOCK / (2048 * moved)

    def text(self) -> str:
        walked = f"{self.path} | {self.issue():.0%}" if self.path else "- | -"
        return f"| {self.name} | {walked} | {self.size} | {self.registers} |"


def tool(name: str) -> str:
    wheels = pathlib.Path(sysconfig.get_path("purelib")) / "nvidia/cu13/bin"
    found = shutil.which(name, path=os.environ["PATH"] + os.pathsep + str(wheels))
    if found is None:
        raise FileNotFoundError(f"{name} is not here: install the wheel nvidia-cuda-{name}")
    return found


def dump(library: pathlib.Path, *options: str) -> str:
    """The output of cuobjdump, which finds nvdisasm through PATH."""
    folder = pathlib.Path(tool("nvdisasm")).parent
    environment = {**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}
    command = [tool("cuobjdump"), *options, str(library)]
    return subprocess.run(
        command, check=True, capture_output=True, text=True, env=environment
    ).stdout


def row_name(mangled: str) -> str:
    """The name in the table, as `encode_ef Int8`; empty for other dtypes than f32, not in it."""
    name, dtype = kernel_of(mangled)
    return name if dtype == F32 else ""


def kernel_of(mangled: str) -> tuple[str, str]:
    """The name in the table, empty if there is none, and the dtype's number, by default f32's."""
    if entries := re.search(r"Entries([A-Z][a-z]+)Kernel", mangled):
        return f"topk {entries[1].lower()}", F32
    widths = re.search(
        rf"\d({'|'.join(WIDTHS)})Kernel(?:ILNS_5DTypeE(\d)E(?:Lb([01])E)?)?", mangled
    )
    if widths is not None:
        kernel, dtype, adds = widths.groups()
        adding = "_add" if adds == "1" else ""
        return f"{WIDTHS[kernel]}{adding} Adaptive", dtype or F32
    if reduction := re.search(
        rf"ReduceKernelI{VARIANT}(?:NS\d*_INS\d*_\d+([A-Za-z]+?\d*)ELb0EEE|S\d*_)"
        r"LNS_5DTypeE(\d)E",
        mangled,
    ):
        up, transforms, down, dtype = reduction.groups()
        return f"reduce {variant_name(up, transforms)}" + (f" to {down}" if down else ""), dtype
    shape = re.search(
        rf"(Encode|Decode|Accumulate)KernelI(?:{VARIANT})?"
        r"LNS_5DTypeE(\d)E(?:Lb([01])E)?",
        mangled,
    )
    if shape is None:
        return "", F32
    kernel, codec, transforms, dtype, adds = shape.groups()
    operation = "encode_ef" if kernel == "Encode" else kernel.lower()
    operation += "_add" if adds == "1" else ""
    return f"{operation} {variant_name(codec, transforms)}".strip(), dtype


def variant_name(codec: str | None, transforms: str | None) -> str:
    return (codec or "") + (":hadamard=1" if transforms == "1" else "")


def instructions(listing: str) -> dict[str, Code]:
    """Address and text of each instruction, by kernel."""
    kernels: dict[str, Code] = {}
    code: Code = []
    for line in listing.splitlines():
        if head := re.match(r"\s*Function : (\S+)", line):
            code = kernels.setdefault(head[1], [])
        elif found := re.match(r"\s+/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;", line):
            code.append((int(found[1], 16), found[2]))
    return kernels


def rows_of(library: pathlib.Path) -> list[Row]:
    usage = dump(library, "-arch", ARCHITECTURE, "-res-usage")
    found = re.findall(r"Function (\S+):\s+REG:(\d+)", usage)
    registers = {name: int(count) for name, count in found if row_name(name)}
    rows = []
    for name, code in instructions(dump(library, "-arch", ARCHITECTURE, "-sass")).items():
        if name not in registers:
            continue
        rounds = RANKS if "ReduceKernel" in name else 1
        walked = 0 if re.search("PlanKernel|Entries", name) else path_length(code, rounds)
        rows.append(Row(row_name(name), walked, len(code), registers[name]))
    return sorted(rows, key=lambda row: row.name)


def spills_of(usage: str) -> list[str]:
    """Kernels that spill registers, from the output of cuobjdump -res-usage."""
    found = []
    for part in re.split(r"Fatbin elf code:\n=+\narch = ", usage)[1:]:
        architecture = part.split()[0]
        for mangled, stack in re.findall(r"Function (\S+):\s+REG:\d+ STACK:(\d+)", part):
            if int(stack) > 0:
                name = kernel_of(mangled)[0] or mangled
                found.append(f"{name} spills {stack} bytes on {architecture}")
    return found


def read_table(text: str) -> dict[str, Row]:
    rows = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 5 and cells[3].isdigit():
            walked = int(cells[1]) if cells[1].isdigit() else 0
            rows[cells[0]] = Row(cells[0], walked, int(cells[3]), int(cells[4]))
    return rows


def complaints(rows: list[Row], table: dict[str, Row]) -> list[str]:
    """The rows that are worse than in the table, missing in it or only there."""
    found = []
    for row in rows:
        before = table.get(row.name)
        if before is None:
            found.append(f"{row.name} is not in the table")
            continue
        for what in ("path", "size"):
            had, has = getattr(before, what), getattr(row, what)
            if has > GROWTH * had:
                found.append(f"{row.name}: {what} of {has} instructions, expected {had} or so")
    found += [f"{name} is no more" for name in table.keys() - {row.name for row in rows}]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", type=pathlib.Path, metavar="TABLE")
    parser.add_argument(
        "library", type=pathlib.Path, nargs="?",
        default=ROOT / "build/integrations/c/libthinwire_cuda.so",
    )  # fmt: skip
    options = parser.parse_args()
    spills = spills_of(dump(options.library, "-res-usage"))
    rows = rows_of(options.library)
    if options.check is None:
        print("| kernel | path | issue | size | registers |\n|---|---|---|---|---|")
        print("\n".join([row.text() for row in rows] + spills))
        return 0
    found = complaints(rows, read_table(options.check.read_text())) + spills
    print("\n".join(found) or f"{len(rows)} kernels are no worse than {options.check}")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
