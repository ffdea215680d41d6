"""Members of rounds between sites are killed, stopped and added at seeded moments: none hangs,
all have the same digest after each round, and no member that lives loses a step.

    python tests/faults/sites_soak.py [--over store|lighthouse] [--rounds 300] [--faults 100]
                                      [--members 4] [--seed 1] [--out FILE.json]

Members meet over a TCPStore, or over torchft's Lighthouse. Processes are forked from one that has
imported everything, so that a newcomer starts at once. One member is never struck: its memory shows
whether survivors leak. It is not the first member, which leads while it is alive. Prints one line
per fault and a summary, and exits with 1 if a property does not hold."""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import multiprocessing
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["thinwire.torch.sites", "torch._dynamo"])

STEP_S = 0.04
STEPS = 4  # of a round
LEAST = 2  # members of a group of up to five; the members must ensure that there is one group
STOPS_S = (0.3, 1.0, 5.0)
RECOVERY_S = 3.0  # from a kill or a stop to the next commit, besides the round itself
LONGEST_S = 15.0  # of a round in which a stop and another fault fall
WITNESS = "m3"  # the member that is never struck
GROWTH_MB = 8.0  # of a survivor's memory over the second half of the run


def be_member(name: str, address: str, folder: str, rounds: int) -> None:
    """Train until the group has made `rounds`, and write a line per committed round to a file."""
    errors = os.open(f"{folder}/{name}.err", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.dup2(errors, 2)
    import torch
    import torch.distributed as dist
    from thinwire.torch import sites

    torch.set_num_threads(1)
    torch.manual_seed(int(name[1:]))
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 8))
    inner = torch.optim.SGD(model.parameters(), lr=0.05)
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    where: str | dist.Store = address
    if not address.startswith("http"):
        host, _, port = address.partition(":")
        where = dist.TCPStore(host, int(port), is_master=False)
    members = sites.join(where, name, min_members=LEAST, timeout_s=120)
    steps, written, heap = 0, 0, ctypes.CDLL(None)
    with (
        sites.DiLoCo(members, [model], inner, outer, STEPS, codec="int4") as diloco,
        open(f"{folder}/{name}.jsonl", "w") as log,
    ):
        while diloco.rounds < rounds:
            model(torch.randn(16, 64)).square().mean().backward()
            time.sleep(STEP_S)
            steps += 1
            inner.step()
            inner.zero_grad()
            for report in [r for r in diloco.reports if r.number >= written]:
                written = report.number + 1
                if name == WITNESS:  # else free memory in the heaps of ended threads counts
                    heap.malloc_trim(0)
                pages = int(Path("/proc/self/statm").read_text().split()[1])
                row = {
                    "round": report.number, "digest": report.digest, "members": report.members,
                    "weight": report.weights[report.members.index(name)], "steps": steps,
                    "time": time.time(), "mb": pages * os.sysconf("SC_PAGE_SIZE") / 1e6,
                }  # fmt: skip
                log.write(json.dumps(row) + "\n")
                log.flush()


class Place:
    """The place where members meet; it outlives them."""

    def __init__(self, over: str) -> None:
        self.over = over
        if over == "store":
            import torch.distributed as dist

            self._server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            self.address = f"127.0.0.1:{self._server.port}"
            return
        from torchft.coordination import LighthouseServer

        self._server = LighthouseServer(
            "127.0.0.1:0", min_replicas=LEAST, join_timeout_ms=2_000, quorum_tick_ms=20,
            heartbeat_timeout_ms=2_000,
        )  # fmt: skip
        self.address = f"http://127.0.0.1:{self._server.address().rpartition(':')[2]}"


class Soak:
    def __init__(self, place: Place, members: int, rounds: int, seed: int, folder: Path) -> None:
        self.random, self.folder, self.rounds = random.Random(seed), folder, rounds
        self.place, self.wanted, self.count = place, members, 0
        self.alive: dict[str, multiprocessing.process.BaseProcess] = {}
        self.killed: dict[str, float] = {}  # name and moment
        self.joined: dict[str, float] = {}
        self.stopped: list[tuple[str, float, float]] = []
        self._seen: dict[str, tuple[int, list[dict]]] = {}  # bytes read, and their rows
        for _ in range(members):
            self.add()

    def add(self) -> str:
        name = f"m{self.count}"
        self.count += 1
        process = _context.Process(
            target=be_member, args=(name, self.place.address, str(self.folder), self.rounds)
        )
        process.start()
        self.alive[name] = process
        return name

    def rows(self, name: str) -> list[dict]:
        at, rows = self._seen.setdefault(name, (0, []))
        file = self.folder / f"{name}.jsonl"
        if file.exists():
            with open(file, "rb") as log:
                log.seek(at)
                for line in log:
                    if not line.endswith(b"\n"):
                        break
                    rows.append(json.loads(line))
                    at += len(line)
            self._seen[name] = (at, rows)
        return rows

    def done(self) -> int:
        return max((self.rows(n)[-1]["round"] + 1 for n in self.alive if self.rows(n)), default=0)

    def fault(self) -> str | None:
        """Cause one fault; return None if it would have to wait for a newcomer. At least two
        members that are not struck live on."""
        trained = [name for name, each in self.alive.items() if self.rows(name) and each.is_alive()]
        struck = [name for name in trained if name != WITNESS]
        kinds = ["kill", "stop"] if len(trained) > 2 and len(struck) > 1 else []
        if len(self.alive) <= self.wanted:
            kinds.append("join")
        if len(self.alive) <= self.wanted - 1 and "kill" in kinds:
            kinds.remove("kill")
        if not kinds:
            return None
        kind = self.random.choice(kinds)
        if kind == "join":
            name = self.add()
            self.joined[name] = time.time()
            return f"join {name}"
        name = self.random.choice(struck)
        if kind == "stop":
            seconds = self.random.choice(STOPS_S)
            # The others train meanwhile, and rounds must be left for the later faults.
            if seconds > (self.rounds - self.done()) * STEP_S * STEPS / 2:
                seconds = STOPS_S[0]
            begun = time.time()
            os.kill(self.alive[name].pid, signal.SIGSTOP)
            time.sleep(seconds)
            os.kill(self.alive[name].pid, signal.SIGCONT)
            self.stopped.append((name, begun, seconds))
            return f"stop {name} for {seconds} s"
        self.killed[name] = time.time()
        self.alive[name].kill()
        self.alive.pop(name).join()
        return f"kill {name}"

    def run(self, faults: int, limit_s: float) -> list[str]:
        end, made = time.monotonic() + limit_s, 0
        while any(process.is_alive() for process in self.alive.values()):
            if time.monotonic() > end:
                return [f"hung: {sorted(self.alive)} still run, {self.done()} rounds were made"]
            for name, process in self.alive.items():
                if process.exitcode not in (None, 0):
                    text = (self.folder / f"{name}.err").read_text()[-1500:]
                    return [f"{name} ended with {process.exitcode}: {text}"]
            # Faults are spread over the first nine tenths of the rounds, each at a random moment of
            # a round.
            time.sleep(self.random.uniform(0.0, 1.5 * STEP_S * STEPS))
            if made < faults and self.done() > made * 0.9 * self.rounds / faults:
                text = self.fault()
                if text is not None:
                    made += 1
                    print(f"round {self.done()}: {text}", flush=True)
        wrong = self.judge()
        if made < faults:
            wrong.append(f"{made} faults were made, expected {faults}")
        return wrong

    def judge(self) -> list[str]:
        wrong, digests = [], {}
        for name in [*self.alive, *self.killed]:
            rows = self.rows(name)
            for row in rows:
                key = (row["digest"], tuple(row["members"]))
                if digests.setdefault(row["round"], key) != key:
                    wrong.append(f"round {row['round']}: {name} has another digest or members")
            counted = sum(row["weight"] for row in rows)
            if name in self.alive and rows and counted != rows[-1]["steps"]:
                wrong.append(f"{name}: {rows[-1]['steps']} steps made, {counted:g} counted")
        missing = set(range(self.rounds)) - set(digests)
        if missing:
            wrong.append(f"rounds {sorted(missing)[:5]} are in no file")
        found = self.figures()
        for kind in ("kill", "stop"):
            took = found[f"{kind}_to_commit_s"]
            slow = [each for each in took if each > RECOVERY_S + found["round_s"]]
            if slow:
                wrong.append(
                    f"from a {kind} to the next commit {slow} s, expected {RECOVERY_S} at most"
                )
        if found["longest_s"] > LONGEST_S:
            wrong.append(f"a round took {found['longest_s']:.1f} s, expected {LONGEST_S} at most")
        if found["growth_mb"] > GROWTH_MB:
            wrong.append(f"{WITNESS}'s memory grew by {found['growth_mb']:.1f} MB")
        return wrong

    def figures(self) -> dict:
        """Return what the witness saw, in seconds: the rounds; from a kill to the next commit
        without the killed member, with kills during a stop listed apart; from a stop that is longer
        than a recovery, with no kill near it, to the next commit without the stopped member; and
        the extra time of rounds in which members came and none left."""
        rows = self.rows(WITNESS)
        times = [row["time"] for row in rows]
        pairs = list(itertools.pairwise(rows))
        gaps = [b["time"] - a["time"] for a, b in pairs]
        median = statistics.median(gaps)
        alone, overlapping = [], []
        for name, at in self.killed.items():
            later = [r["time"] for r in rows if r["time"] > at and name not in r["members"]]
            if later:
                struck = any(begun < later[0] and at < begun + took + RECOVERY_S
                             for _, begun, took in self.stopped)  # fmt: skip
                (overlapping if struck else alone).append(later[0] - at)
        stops = []
        for name, at, took in self.stopped:
            group = next((r["members"] for r in reversed(rows) if r["time"] < at), [])
            # Over a Lighthouse a stopped member of two may also be cut off, so the other one waits
            # for it.
            waits = self.place.over == "lighthouse" and len(group) == 2
            also = any(at - RECOVERY_S < killed < at + took for killed in self.killed.values())
            if took > RECOVERY_S and not waits and not also:
                later = [r["time"] for r in rows if r["time"] > at and name not in r["members"]]
                stops.append(later[0] - at if later else took)
        entries = [
            gap - median
            for (a, b), gap in zip(pairs, gaps, strict=True)
            if set(b["members"]) > set(a["members"])
        ]
        half = [row["mb"] for row in rows[len(rows) // 2 :]]
        return {
            "rounds": len(times), "round_s": median, "longest_s": max(gaps),
            "kill_to_commit_s": sorted(alone), "with_a_stop_s": sorted(overlapping),
            "stop_to_commit_s": sorted(stops),
            "entry_s": sorted(entries), "growth_mb": half[-1] - half[0], "mb": half[-1],
            "killed": len(self.killed), "joined": len(self.joined), "stopped": len(self.stopped),
            "members": self.count,
        }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--over", choices=("store", "lighthouse"), default="store")
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--members", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--limit_s", type=float, default=3600.0)
    parser.add_argument("--out", type=Path, help="a file for the figures, as JSON")
    parser.add_argument("--folder", type=Path, help="where members' files are kept")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = given.folder or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        print(f"seed {given.seed}, over {given.over}", flush=True)
        soak = Soak(Place(given.over), given.members, given.rounds, given.seed, folder)
        try:
            wrong = soak.run(given.faults, given.limit_s)
            found = soak.figures() if len(soak.rows(WITNESS)) > 2 else None
        finally:
            for process in soak.alive.values():
                process.kill()
                process.join()
    for line in wrong:
        print(f"WRONG: {line}")
    if found is not None:
        kills, entries = found["kill_to_commit_s"] or [0.0], found["entry_s"] or [0.0]
        both, stops = found["with_a_stop_s"] or [0.0], found["stop_to_commit_s"] or [0.0]
        print(
            f"{found['rounds']} rounds, {found['killed']} members killed, {found['stopped']} "
            f"stopped, {found['joined']} joined; a round {found['round_s']:.2f} s in the median, "
            f"{found['longest_s']:.2f} s at most; from a kill to the next commit "
            f"{statistics.median(kills):.2f} s, {kills[-1]:.2f} s at most, with a stop meanwhile "
            f"{both[-1]:.2f} s; from a long stop {statistics.median(stops):.2f} s, "
            f"{stops[-1]:.2f} s at most; a newcomer's entry "
            f"{statistics.median(entries):.2f} s, {entries[-1]:.2f} s at most; {WITNESS} has "
            f"{found['mb']:.0f} MB, {found['growth_mb']:+.1f} in the second half"
        )
        if given.out is not None:
            report = {"seed": given.seed, "over": given.over, "wrong": wrong, **found}
            given.out.write_text(json.dumps(report, indent=1) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
