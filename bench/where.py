"""Where the time of an allreduce goes, by a profile of the whole machine.

    python bench/where.py [--codec int4] [--links loopback,10gbit] [--bytes 1048576,16777216]
                          [--seconds 3] [--out build/bench/where.json]

Two ranks do one allreduce after another while perf samples every core. A row has milliseconds of
one allreduce and rank: of processor time by what it was spent on, and idle; they add up to its
time, with two ranks on two cores. Needs perf (Debian: linux-perf) and root; without them it says
so and measures nothing."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "integrations" / "python"))
from versus_team import Team

sys.path.append(str(Path(__file__).resolve().parents[1]))
from demo import lab

ROOT = Path(__file__).resolve().parents[1]
WORLD = 2
HERTZ = 5000
# The first pattern that is found in "process;library;symbol" says where a sample belongs.
PLACES = {
    "idle": r"^swapper;",
    "codecs": r"libthinwire\.so;.*(simd::|codecs::)|;mem(move|set|cpy)",
    "engine": r";libthinwire\.so;",
    "Gloo": r";libgloo",
    "locks": r"absl_|pthread_mutex",
    "kernel copies": r"_copy_(to|from)_iter|copy_user|check_object_size|clear_page",
    "wake-ups": r"futex|sched|wake|raw_spin|finish_task|epoll|eventfd|hrtimer|switch|idle",
    "network": r";\[kernel.*(tcp|ip_|skb|sock|inet|net_|dev_|xmit|veth|br_|tbf|qdisc|softirq)",
    "kernel, other": r";\[kernel",
    "Python": r";(libpython|python)",
}


def refusal() -> str:
    if shutil.which("perf") is None:
        return "perf is not installed (Debian: linux-perf)"
    return "" if os.geteuid() == 0 else "perf needs root to sample every core"


def place_of(sample: str) -> str:
    return next((place for place, found in PLACES.items() if re.search(found, sample)), "other")


def samples_of(profile: str) -> Counter[str]:
    command = [
        "perf",
        "report",
        "-i",
        profile,
        "--stdio",
        "-n",
        "-t",
        ";",
        "--sort",
        "comm,dso,sym",
    ]
    report = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    places: Counter[str] = Counter()
    for line in report.splitlines():
        if not line or line.startswith("#"):
            continue
        _share, count, *sample = (field.strip() for field in line.split(";", 4))
        places[place_of(";".join(sample))] += int(count)
    return places


def measure(team: Team, codec: str, size: int, seconds: float) -> dict[str, float]:
    """Milliseconds of one allreduce and rank."""
    subject = f"allreduce {codec} {size}"
    repeats = max(5, int(0.3 / team.turn(subject, 20)))
    with tempfile.TemporaryDirectory() as folder:
        profile = f"{folder}/perf.data"
        command = ["perf", "record", "-q", "-a", "-e", "cpu-clock", "-F", str(HERTZ), "-o", profile]
        with subprocess.Popen(command, stderr=subprocess.DEVNULL) as perf:
            time.sleep(0.3)  # until it samples
            end = time.monotonic() + seconds
            times = [team.turn(subject, repeats)]
            while time.monotonic() < end:
                times.append(team.turn(subject, repeats))
            perf.terminate()
        places = samples_of(profile)
    taken = 1e3 * statistics.median(times)
    in_all = sum(places.values())
    per_rank = taken * os.cpu_count() / WORLD
    return {"ms": taken} | {
        place: per_rank * places[place] / in_all for place in (*PLACES, "other")
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--codec", default="int4")
    parser.add_argument("--links", default=f"{lab.LOOPBACK},10gbit")
    parser.add_argument("--bytes", default="1048576,16777216")
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "bench" / "where.json")
    arguments = parser.parse_args()
    if why := refusal():
        print(f"skipped: {why}")
        return 0
    rows = {}
    for link in arguments.links.split(","):
        with lab.open_lab(WORLD, link) as place:
            team = Team(ROOT, place, 29500)
            for size in map(int, arguments.bytes.split(",")):
                name = f"{arguments.codec} {size >> 10} KiB, {link}"
                rows[name] = measure(team, arguments.codec, size, arguments.seconds)
            team.close()
    print(f"| ms of one allreduce and rank | {' | '.join(rows)} |\n|---|{'---|' * len(rows)}")
    for place in ("ms", *PLACES, "other"):
        values = " | ".join(f"{row[place]:.3f}" for row in rows.values())
        print(f"| {'its time' if place == 'ms' else place} | {values} |")
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
