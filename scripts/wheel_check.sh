#!/usr/bin/env bash
# The newest wheel in an empty virtual environment, without a compiler and away from the checkout:
# it must load only the libraries that it brings, and run the hook on two ranks.
set -euo pipefail
cd "$(dirname "$0")/.."
wheel=$(ls -t "$PWD"/dist/*.whl | head -1)
torch=$(.venv/bin/python -c 'import site; print(site.getsitepackages()[0])')
room=$(mktemp -d)
trap '/bin/rm -rf "$room"' EXIT

python3 -m venv "$room/venv"
"$room/venv/bin/python" -m pip install -q --no-deps --disable-pip-version-check "$wheel"
# torch comes from the project's environment instead of a second download.
echo "$torch" >"$("$room/venv/bin/python" -c 'import site; print(site.getsitepackages()[0])')/torch.pth"

cd "$room"
cat >step.py <<'PY'
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from thinwire.torch import State, hook

rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[2], rank=rank, world_size=2)
ddp = DistributedDataParallel(torch.nn.Linear(512, 512))
state = State(codec="int4")
ddp.register_comm_hook(state, hook)
for _ in range(3):
    ddp(torch.randn(8, 512)).square().mean().backward()
assert state.stats()["ratio"] > 7, state.stats()
total = ddp.module.weight.grad.double().sum()
sums = [torch.zeros_like(total) for _ in range(2)]
dist.all_gather(sums, total)
assert sums[0] == sums[1]
print(f"rank {rank}: ratio {state.stats()['ratio']:.2f}")
PY
unset PYTHONPATH THINWIRE_LIBRARY
export PATH=$room/venv/bin:/nowhere
python - <<'PY'
import pathlib
import thinwire

thinwire.simd_target()
home = str(pathlib.Path(thinwire.__file__).parent / "lib")
maps = {line.split()[-1] for line in open("/proc/self/maps") if ".so" in line}
ours = [m for m in maps if any(n in m for n in ("gloo", "hwy", "absl", "isal", "hiredis", "ibverbs", "libnl"))]
strangers = [m for m in ours if not m.startswith(home)]
assert ours and not strangers, f"not from the wheel: {strangers}"
# Python's ssl in the same process would get a libcrypto of ours, and may need a newer one.
assert not list(pathlib.Path(home).glob("libcrypto*")), "libcrypto is linked in statically"
PY
python step.py 0 "$room/meet" &
python step.py 1 "$room/meet"
wait $!
echo "$(/usr/bin/basename "$wheel") works in an empty environment"
