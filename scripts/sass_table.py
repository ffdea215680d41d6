"""kernels/sass.md: what the machine code of each kernel costs, counted and not run.

    scripts/sass_table.py [--check kernels/sass.md] [build/integrations/c/libthinwire_cuda.so]

Prints the tables; with --check says which rows have got worse, exit 1. cuobjdump and nvdisasm are
those of PATH, or of the wheels nvidia-cuda-cuobjdump and nvidia-cuda-nvdisasm.

A thread has 16 elements of a tile. `path` counts the instructions that it executes for those of a
full, aligned tile of finite values, in blocks of 256, in the only job of a launch, rounded to
nearest, with feedback: a walk through the code that decides every branch by what lies behind it
(`jumps`), and goes once through a loop. Of a reduction, whose loop over ranks holds a switch over
codecs, and of topk, whose way goes by the values, only the size is counted. `issue` is the share of
a multiprocessor's four schedulers that `path` takes while memory runs at its full rate; `stack` are
the bytes of spilled registers. These rows are the kernels of f32 on one architecture; what spills
is looked for in those of every dtype, on every architecture that both have, library and table."""

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

ROOT = pathlib.Path(__file__).resolve().parent.parent
ARCHITECTURE = "sm_90"
# 4.3 TB/s, as measured for copies on an H200, by 132 multiprocessors of 1.98 GHz.
BYTES_PER_CLOCK = 16.45
BITS = {
    "Fp32": 32, "Bf16": 16, "Int8": 8.0625, "Int4": 4.0625, "OneBit": 1.0625, "Adaptive": 2.0625
}  # fmt: skip
# Floats that are read and written for each element, beside the codes.
FLOATS = {
    "encode_ef": 3, "encode_heads": 3, "encode_codes": 2, "decode": 1, "decode_add": 2,
    "accumulate": 3,
}  # fmt: skip
# The kernels of codecs of widths (kernels/cuda_widths.cu), which do not have the codec's name.
WIDTHS = {
    "Plan": "plan", "EncodeHeads": "encode_heads", "EncodeCodes": "encode_codes",
    "DecodeWidths": "decode", "ReduceToWidths": "reduce to",
}  # fmt: skip
GROWTH = 1.1
LONGEST_PATH = 20000
F32 = "0"
Code = list[tuple[int, str]]
Spills = dict[str, dict[str, int]]  # bytes of a thread, the most of all dtypes, by architecture


@dataclass
class Row:
    name: str
    path: int  # 0: not walked
    size: int
    registers: int
    stack: int  # bytes of a thread, which are spilled registers

    def issue(self) -> float:
        operation, codec = self.name.split()[0], re.search(r"\w+$", self.name.split(":")[0])[0]
        moved = 4 * FLOATS[operation] + BITS.get(codec, 0) / 8
        return self.path * BYTES_PER_CLOCK / (2048 * moved)

    def text(self) -> str:
        walked = f"{self.path} | {self.issue():.0%}" if self.path else "- | -"
        return f"| {self.name} | {walked} | {self.size} | {self.registers} | {self.stack} |"


def tool(name: str) -> str:
    wheels = pathlib.Path(sysconfig.get_path("purelib")) / "nvidia/cu13/bin"
    found = shutil.which(name, path=os.environ["PATH"] + os.pathsep + str(wheels))
    if found is None:
        raise FileNotFoundError(f"{name} is not here: install the wheel nvidia-cuda-{name}")
    return found


def dump(library: pathlib.Path, *options: str) -> str:
    """cuobjdump's output; it finds nvdisasm by PATH."""
    folder = pathlib.Path(tool("nvdisasm")).parent
    environment = {**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}
    command = [tool("cuobjdump"), *options, str(library)]
    return subprocess.run(
        command, check=True, capture_output=True, text=True, env=environment
    ).stdout


def row_name(mangled: str) -> str:
    """Such as `encode_ef Int8`; empty for what the table leaves out: other dtypes than f32."""
    name, dtype = kernel_of(mangled)
    return name if dtype == F32 else ""


def kernel_of(mangled: str) -> tuple[str, str]:
    """The name in the table, or an empty one, and the dtype's number; f32's where it has none."""
    if entries := re.search(r"Entries([A-Z][a-z]+)Kernel", mangled):
        return f"topk {entries[1].lower()}", F32
    widths = re.search(
        rf"\d({'|'.join(WIDTHS)})Kernel(?:ILNS_5DTypeE(\d)E(?:Lb([01])E)?)?", mangled
    )
    if widths is not None:
        kernel, dtype, adds = widths.groups()
        adding = "_add" if adds == "1" else ""
        return f"{WIDTHS[kernel]}{adding} Adaptive", dtype or F32
    shape = re.search(
        r"(Encode|Decode|Reduce|Accumulate)Kernel"
        r"I(?:NS0_7VariantINS_6codecs\d+([A-Za-z]+?\d*)ELb([01])EEE)?"
        r"LNS_5DTypeE(\d)E(?:Lb([01])E)?",
        mangled,
    )
    if shape is None:
        return "", F32
    kernel, codec, transforms, dtype, adds = shape.groups()
    operation = {"Encode": "encode_ef", "Reduce": "reduce to"}.get(kernel, kernel.lower())
    operation += "_add" if adds == "1" else ""
    name = f"{operation} {codec or ''}".strip() + (":hadamard=1" if transforms == "1" else "")
    return name, dtype


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


def jumps(code: Code, begin: int, end: int) -> bool:
    """Whether the path takes a conditional branch at index `begin` to index `end`."""
    if end <= begin:
        return False  # loops over jobs and rests run once
    skipped = [text for _, text in code[begin + 1 : end]]
    ahead: list[str] = []
    for _, text in code[end : end + 6]:
        ahead.append(text)
        if re.search(r"BSYNC|\bBRA\b", text):
            break
    aligned = any(re.search(r"(LDG|STG)\.E\.(128|64)", text) for text in ahead)
    to_nearest = any("F2I.NTZ" in text for text in ahead[:5])
    repairs_nans = any("0x400000" in text for text in skipped[:6])
    slow_division = len(skipped) < 10 and any("CALL.REL" in text for text in skipped[:8])
    large_blocks = has_loop_of_maxima(code[begin + 1 : end])
    return aligned or to_nearest or repairs_nans or slow_division or large_blocks


def has_loop_of_maxima(code: Code) -> bool:
    """As over the parts of a block that is larger than the default of 256 elements."""
    for address, text in code:
        target = re.search(r"\bBRA\b.* 0x([0-9a-f]+)$", text)
        head = int(target[1], 16) if target else address
        body = [text for place, text in code if head <= place < address]
        if head >= code[0][0] and any("VIMNMX" in text for text in body):
            return True
    return False


def path_length(code: Code) -> int:
    index = {address: i for i, (address, _) in enumerate(code)}
    at = count = 0
    while at < len(code) and count < LONGEST_PATH:
        predicate, body = re.match(r"(@!?U?P\w+\s+)?(.*)", code[at][1]).groups()
        count += 1
        if body.startswith("EXIT") and not predicate:
            break
        target = re.match(r"BRA\b.* 0x([0-9a-f]+)$", body)
        if target:
            end = index[int(target[1], 16)]
            if end == at:  # the trap behind the end
                break
            conditional = predicate or re.match(r"BRA\S*\s+!?U?P\d", body)
            at = end if not conditional or jumps(code, at, end) else at + 1
        else:
            at += 1
    return count


def rows_of(library: pathlib.Path) -> list[Row]:
    usage = dump(library, "-arch", ARCHITECTURE, "-res-usage")
    found = re.findall(r"Function (\S+):\s+REG:(\d+) STACK:(\d+)", usage)
    resources = {name: (int(regs), int(stack)) for name, regs, stack in found if row_name(name)}
    rows = []
    for name, code in instructions(dump(library, "-arch", ARCHITECTURE, "-sass")).items():
        if name not in resources:
            continue
        walked = 0 if re.search("(Reduce|Plan)Kernel|Entries", name) else path_length(code)
        rows.append(Row(row_name(name), walked, len(code), *resources[name]))
    return sorted(rows, key=lambda row: row.name)


def spills_of(usage: str) -> Spills:
    """What cuobjdump -res-usage says, of all architectures."""
    spills: Spills = {}
    for part in re.split(r"Fatbin elf code:\n=+\narch = ", usage)[1:]:
        architecture = spills.setdefault(part.split()[0], {})
        for mangled, stack in re.findall(r"Function (\S+):\s+REG:\d+ STACK:(\d+)", part):
            name = kernel_of(mangled)[0] or mangled
            if int(stack) > 0:
                architecture[name] = max(int(stack), architecture.get(name, 0))
    return spills


def spill_table(spills: Spills) -> str:
    architectures = sorted(spills, key=lambda name: int(re.sub(r"\D", "", name)))
    lines = [" | ".join(["| spills", *architectures]) + " |", "|---" * (len(spills) + 1) + "|"]
    for name in sorted({name for kernels in spills.values() for name in kernels}):
        stacks = [str(spills[architecture].get(name, 0)) for architecture in architectures]
        lines.append(" | ".join([f"| {name}", *stacks]) + " |")
    return "\n".join(lines)


def read_spills(text: str) -> Spills:
    table = [line.strip("|").split("|") for line in text[text.find("| spills |") :].splitlines()]
    architectures = [cell.strip() for cell in table[0][1:]]
    spills: Spills = {architecture: {} for architecture in architectures}
    for name, *stacks in table[2:]:
        for architecture, stack in zip(architectures, stacks, strict=True):
            spills[architecture][name.strip()] = int(stack)
    return spills


def worse_spills(spills: Spills, table: Spills) -> list[str]:
    """On the architectures that the table has."""
    return [
        f"{name} spills {stack} bytes on {architecture}, expected {most}"
        for architecture, known in table.items()
        for name, stack in spills.get(architecture, {}).items()
        if stack > (most := known.get(name, 0))
    ]


def read_table(text: str) -> dict[str, Row]:
    rows = {}
    for line in text.split("| spills |")[0].splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 6 and cells[3].isdigit():
            walked = int(cells[1]) if cells[1].isdigit() else 0
            rows[cells[0]] = Row(cells[0], walked, int(cells[3]), int(cells[4]), int(cells[5]))
    return rows


def complaints(rows: list[Row], table: dict[str, Row]) -> list[str]:
    """What has got worse than the table says."""
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
        if row.stack > before.stack:
            found.append(f"{row.name} spills {row.stack} bytes, expected {before.stack}")
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
    rows = rows_of(options.library)
    spills = spills_of(dump(options.library, "-res-usage"))
    if options.check is None:
        print("| kernel | path | issue | size | registers | stack |\n|---|---|---|---|---|---|")
        print("\n".join(row.text() for row in rows))
        print("", spill_table(spills), sep="\n")
        return 0
    text = options.check.read_text()
    found = complaints(rows, read_table(text)) + worse_spills(spills, read_spills(text))
    where = " ".join(spills)
    print("\n".join(found) or f"{len(rows)} kernels are no worse than {options.check} ({where})")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
