"""Members of rounds between sites are killed, stopped and added at seeded moments, over a store:
nobody hangs, all have the same digest after each round, and no member that lives loses a step.

    python tests/faults/sites_soak.py [--rounds 300] [--faults 100] [--seed 1] [--members 4]

It prints one line a fault and a summary, and exits with 1 where a property does not hold."""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

STEP_S = 0.01


def be_member(name: str, port: int, folder: Path, rounds: int) -> None:
    """Trains until the group has made `rounds`; a line of its file for each round it commits."""
    from thinwire.torch import sites

    torch.set_num_threads(1)
    torch.manual_seed(hash(name) % 1000)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 8))
    inner = torch.optim.SGD(model.parameters(), lr=0.05)
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    members = sites.join(store, name, min_members=2, timeout_s=120, dead_s=3.0)
    steps, written = 0, 0
    with (
        sites.DiLoCo(members, [model], inner, outer, 4, codec="int4") as diloco,
        open(folder / f"{name}.jsonl", "w") as log,
    ):
        while diloco.rounds < rounds:
            x = torch.randn(16, 64)
            model(x).square().mean().backward()
            steps += 1
            inner.step()
            inner.zero_grad()
            reports = [r for r in diloco.reports if r.number >= written]
            for report in reports:
                written = report.number + 1
                pages = int(Path("/proc/self/statm").read_text().split()[1])
                row = {
                    "round": report.number, "digest": report.digest, "members": report.members,
                    "weight": report.weights[report.members.index(name)], "steps": steps,
                    "time": time.time(), "mb": pages * os.sysconf("SC_PAGE_SIZE") / 1e6,
                }  # fmt: skip
                log.write(json.dumps(row) + "\n")
                log.flush()
            time.sleep(STEP_S)


class Soak:
    def __init__(self, members: int, rounds: int, seed: int, folder: Path) -> None:
        self.random, self.folder, self.rounds = random.Random(seed), folder, rounds
        self.server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.alive: dict[str, subprocess.Popen[bytes]] = {}
        self.count, self.wanted = 0, members
        self.killed: list[str] = []
        for _ in range(members):
            self.add()

    def add(self) -> str:
        name = f"m{self.count}"
        self.count += 1
        with open(self.folder / f"{name}.err", "w") as errors:
            self.alive[name] = subprocess.Popen(
                [sys.executable, __file__, "--member", name, "--port", str(self.server.port),
                 "--folder", str(self.folder), "--rounds", str(self.rounds)],
                stderr=errors,
            )  # fmt: skip
        return name

    def rows(self, name: str) -> list[dict]:
        file = self.folder / f"{name}.jsonl"
        lines = file.read_text().splitlines(keepends=True) if file.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def done(self) -> int:
        return max((self.rows(n)[-1]["round"] + 1 for n in self.alive if self.rows(n)), default=0)

    def fault(self) -> str:
        """One fault. At least two members live on, untouched."""
        # A member that has made a round, so that there is something to lose.
        trained = [name for name in self.alive if self.rows(name)]
        kind = self.random.choice(["kill", "stop", "join"])
        if len(self.alive) < self.wanted:
            kind = "join"
        elif len(self.alive) > self.wanted:
            kind = "kill"
        if kind == "join" or len(trained) < 3:
            return f"join {self.add()}"
        name = self.random.choice(trained)
        if kind == "stop":
            seconds = self.random.choice([0.3, 1.0, 5.0])
            self.alive[name].send_signal(signal.SIGSTOP)
            time.sleep(seconds)
            self.alive[name].send_signal(signal.SIGCONT)
            return f"stop {name} for {seconds} s"
        self.alive[name].kill()
        self.alive.pop(name).wait()
        self.killed.append(name)
        return f"kill {name}"

    def run(self, faults: int, limit_s: float) -> list[str]:
        end, made = time.monotonic() + limit_s, 0
        while any(process.poll() is None for process in self.alive.values()):
            if time.monotonic() > end:
                return [f"hung: {sorted(self.alive)} still run, {self.done()} rounds were made"]
            for name, process in self.alive.items():
                if process.poll() not in (None, 0):
                    text = (self.folder / f"{name}.err").read_text()[-1500:]
                    return [f"{name} ended with {process.returncode}: {text}"]
            # Faults are spread over the first nine tenths of the rounds.
            if made < faults and self.done() > made * 0.9 * self.rounds / faults:
                made += 1
                print(f"round {self.done()}: {self.fault()}", flush=True)
            time.sleep(self.random.uniform(0.01, 0.2))
        return self.judge()

    def judge(self) -> list[str]:
        wrong, digests = [], {}
        for name in [*self.alive, *self.killed]:
            rows = self.rows(name)
            for row in rows:
                key = (row["digest"], tuple(row["members"]))
                if digests.setdefault(row["round"], key) != key:
                    wrong.append(f"round {row['round']}: {name} has another digest or members")
            counted = sum(row["weight"] for row in rows)
            if rows and abs(counted - rows[-1]["steps"]) > 0:
                wrong.append(f"{name}: {rows[-1]['steps']} steps made, {counted:g} counted")
        missing = set(range(self.rounds)) - set(digests)
        if missing:
            wrong.append(f"rounds {sorted(missing)[:5]} are in no file")
        return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--members", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--limit_s", type=float, default=3600.0)
    parser.add_argument("--member")
    parser.add_argument("--port", type=int)
    parser.add_argument("--folder", type=Path)
    given = parser.parse_args()
    if given.member:
        be_member(given.member, given.port, given.folder, given.rounds)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        print(f"seed {given.seed}", flush=True)
        soak = Soak(given.members, given.rounds, given.seed, Path(folder))
        try:
            wrong = soak.run(given.faults, given.limit_s)
            longest = sorted(
                b["time"] - a["time"]
                for name in soak.alive
                for a, b in zip(soak.rows(name), soak.rows(name)[1:], strict=False)
            )
            memory = [row["mb"] for name in soak.alive for row in soak.rows(name)[-1:]]
        finally:
            for process in soak.alive.values():
                process.kill()
                process.wait()
    for line in wrong:
        print(f"WRONG: {line}")
    if longest:
        print(
            f"{given.rounds} rounds, {soak.count} members in all, {len(soak.killed)} killed; "
            f"between two rounds {longest[len(longest) // 2]:.2f} s in the median, "
            f"{longest[-1]:.2f} s at most; {max(memory):.0f} MB"
        )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
