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
ADAPTIVE_MUST = {  # with AVX-512
    "encode_ef": {True: 1.6, False: 2.2},
    "decode": {True: 1.6, False: 1.6},
    "decode_add": {True: 1.6, False: 1.6},
}
# speed-up >= must over Gloo's fp32, 2 ranks, by link, bytes and codec.
ALLREDUCE_MUST = {
    ("1gbit", 1 << 24): {"int8": 3.88, "int4": 7.65, "onebit:down=onebit": 28.5, "adaptive": 14.3},
    ("5gbit", 1 << 24): {"int8": 3.5, "int4": 5.8, "onebit:down=onebit": 10},
    ("10gbit", 1 << 24): {"int8": 3, "int4": 4.5, "onebit:down=onebit": 7},
    ("10gbit", 1 << 20): {
        "fp32": 1.2,
        "bf16": 1.2,
        "int8": 2,
        "int4": 3,
        "onebit:down=onebit": 3.5,
    },
    ("loopback", 1 << 24): {"fp32": 1.25, "int8": 2.2, "int4": 3.2, "onebit:down=onebit": 4.2},
}
ANY_MUST = 1.0  # of all others
SELECT_MUST = 1.25  # topk with last step's threshold: time <= must x twin
COLD_MUST = 8.0  # topk without it: speed-up over std::nth_element and separate passes
ROUNDING_MUST = 1.5  # stochastic rounding: time <= must x nearest
# speed-up over another way, in one run: link and way -> (other way, must).
STEP_MUST = {
    ("1gbit", "int4"): ("plain", 5.6),
    ("100mbit", "int4"): ("plain", 7.5),
    ("10gbit", "int4"): ("plain", 2.2),
    ("loopback", "int4"): ("plain", 1.85),
    ("100mbit", "onebit"): ("plain", 12.0),
    ("100mbit", "onebit:down=onebit"): ("plain", 27.0),
    ("100mbit", "topk:density=0.01"): ("plain", 45.0),
}


def row(what: str, reached: float, must: float | None, met: bool, spread: str = "") -> None:
    wanted = f"{must:7.2f}" if must is not None else "      -"
    verdict = "" if must is None else "ok" if met else "MISSED"
    print(f"{what:42s} must {wanted}  reached {reached:7.2f}  {spread:16s} {verdict}")


def codec_must(simd: str, op: str, spec: str, large: bool) -> float | None:
    if op in ("select", "rounding"):
        return SELECT_MUST if op == "select" else ROUNDING_MUST
    if spec == "adaptive" and simd == "AVX3":
        return ADAPTIVE_MUST.get(op, {}).get(large)
    if spec not in ("int8", "int4", "onebit"):
        return None
    if op in ("decode", "decode_add"):
        return DECODE_MUST[large]
    return CODEC_MUST.get(simd, {}).get((op, large))


def codec_table(path: pathlib.Path) -> None:
    simd = path.stem.removeprefix("codec-")
    print(f"\nCodecs on {simd}, one core: time / twin's time")
    for bench in json.loads(path.read_text() or "{}").get("benchmarks", []):
        op, spec, size = bench["name"].split("/")[:3]
        what = f"{op} {spec} {int(size) >> 10} KiB"
        if op == "select_cold":  # here the twin is the simple way, and the figure a speed-up
            reached = 1 / bench["ratio_to_twin"]
            row(f"{what}, speed-up", reached, COLD_MUST, reached >= COLD_MUST)
            continue
        must = codec_must(simd, op, spec, int(size) >= 1 << 26)
        ratio = bench["ratio_to_twin"]
        spread = f"[{bench['ratio_low']:.2f} {bench['ratio_high']:.2f}]"
        row(what, ratio, must, must is None or ratio <= must, spread)


def allreduce_table(path: pathlib.Path) -> None:
    link = path.stem.removeprefix("allreduce-")
    rows = json.loads(path.read_text() or "[]")
    print(f"\nAllreduce over {link}, 2 ranks: speed-up over Gloo's fp32")
    if not rows:
        print("skipped: this link needs root")
    for r in rows:
        must = ALLREDUCE_MUST.get((link, r["bytes"]), {}).get(r["codec"], ANY_MUST)
        spread = f"[{r['gloo_ms'] / r['high_ms']:.2f} {r['gloo_ms'] / r['low_ms']:.2f}]"
        what = f"{r['codec']} {r['bytes'] >> 10} KiB ({r['ms']:.2f} ms"
        what += f", limit {r['limit_ms']:.2f})" if "limit_ms" in r else ")"
        row(what, r["speedup"], must, must is None or r["speedup"] >= must, spread)


def step_table(path: pathlib.Path) -> None:
    print("\nDDP step, 16.8 MB of gradients: speed-up over plain")
    rows = json.loads(path.read_text())
    rows = rows["rows"] if isinstance(rows, dict) else rows
    times = {(r["link"], r["codec"]): r["step_ms"] for r in rows}
    for link, codec in times:
        over, must = STEP_MUST.get((link, codec), ("plain", None))
        if (link, over) not in times or codec == over:
            continue
        reached = times[link, over] / times[link, codec]
        what = f"{link} {codec} ({times[link, codec]:.1f} ms) over {over}"
        row(what, reached, must, must is None or reached >= must)


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
