"""Prints benchmark results against their targets: report.py FOLDER (filled by scripts/bench.sh)."""

from __future__ import annotations

import json
import pathlib
import sys

# time <= must x twin, by operation and whether the data come from memory (64 MiB).
CODEC_MUST = {
    "AVX3": {("encode_ef", True): 1.10, ("encode_ef", False): 1.8},
    "AVX2": {("encode_ef", True): 1.10, ("encode_ef", False): 2.6},
}
DECODE_MUST = {True: 1.1, False: 1.3}
# speed-up >= must over Gloo's fp32, 16 MiB, 2 ranks.
ALLREDUCE_MUST = {
    "1gbit": {"int8": 3.75, "int4": 7.4},
    "5gbit": {"int8": 2.9, "int4": 3.6},
    "10gbit": {"int8": 2.3, "int4": 2.8},
    "loopback": {"fp32": 1.1, "int8": 1.8, "int4": 2.5},
}
SMALL_MUST = 1 / 1.03  # tensors of at most 64 KiB, any link, any codec
# speed-up of int4 over another way, in one run.
STEP_MUST = {"1gbit": ("plain", 4.0), "100mbit": ("plain", 6.5), "10gbit": ("bf16", 1.0)}


def row(what: str, reached: float, must: float | None, met: bool, spread: str = "") -> None:
    wanted = f"{must:7.2f}" if must is not None else "      -"
    verdict = "" if must is None else "ok" if met else "MISSED"
    print(f"{what:42s} must {wanted}  reached {reached:7.2f}  {spread:16s} {verdict}")


def codec_table(path: pathlib.Path) -> None:
    simd = path.stem.removeprefix("codec-")
    print(f"\nCodecs on {simd}, one core: time / twin's time")
    for bench in json.loads(path.read_text() or "{}").get("benchmarks", []):
        op, spec, size = bench["name"].split("/")[:3]
        large = int(size) >= 1 << 26
        must = None
        if spec in ("int8", "int4"):
            must = CODEC_MUST.get(simd, {}).get((op, large))
            if op in ("decode", "decode_add"):
                must = DECODE_MUST[large]
        ratio = bench["ratio_to_twin"]
        spread = f"[{bench['ratio_low']:.2f} {bench['ratio_high']:.2f}]"
        row(
            f"{op} {spec} {int(size) >> 10} KiB", ratio, must, must is None or ratio <= must, spread
        )


def allreduce_table(path: pathlib.Path) -> None:
    link = path.stem.removeprefix("allreduce-")
    rows = json.loads(path.read_text() or "[]")
    print(f"\nAllreduce over {link}, 2 ranks: speed-up over Gloo's fp32")
    if not rows:
        print("skipped: this link needs root")
    for r in rows:
        must = ALLREDUCE_MUST[link].get(r["codec"]) if r["bytes"] == 1 << 24 else None
        if r["bytes"] <= 1 << 16:
            must = SMALL_MUST
        spread = f"[{r['gloo_ms'] / r['high_ms']:.2f} {r['gloo_ms'] / r['low_ms']:.2f}]"
        what = f"{r['codec']} {r['bytes'] >> 10} KiB ({r['ms']:.2f} ms)"
        row(what, r["speedup"], must, must is None or r["speedup"] >= must, spread)


def step_table(path: pathlib.Path) -> None:
    print("\nDDP step, 16.8 MB of gradients: speed-up over plain (for 10gbit over bf16)")
    rows = json.loads(path.read_text())
    rows = rows["rows"] if isinstance(rows, dict) else rows
    times = {(r["link"], r["codec"]): r["step_ms"] for r in rows}
    for link, codec in times:
        over, must = STEP_MUST.get(link, ("plain", None))
        if (link, over) not in times or codec == over:
            continue
        reached = times[link, over] / times[link, codec]
        wanted = must if codec == "int4" else None
        what = f"{link} {codec} ({times[link, codec]:.1f} ms) over {over}"
        row(what, reached, wanted, wanted is None or reached >= wanted)


def main() -> None:
    folder = pathlib.Path(sys.argv[1])
    for path in sorted(folder.glob("codec-*.json")):
        codec_table(path)
    for path in sorted(folder.glob("allreduce-*.json")):
        allreduce_table(path)
    step = folder / "ddp_step.json"
    if step.exists():
        step_table(step)
    else:
        print("\nDDP step: skipped, no results")


if __name__ == "__main__":
    main()
