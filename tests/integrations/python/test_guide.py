"""The program that recovers and the code of the guide for new adapters run as they stand."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
GUIDE = ROOT / "docs" / "guides" / "add-a-framework.md"


def on_two_ranks(*command: str) -> str:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    done = subprocess.run([*torchrun, *command], capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_two_ranks_go_on_when_one_is_killed():
    program = ROOT / "integrations" / "examples" / "recover.py"
    done = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, timeout=180
    )
    assert "exit codes: [0, -9, 0]" in done.stdout, done.stdout + done.stderr
    for rank in (0, 2):
        loss = re.search(rf"rank {rank}: 60 steps, loss ([\d.]+), replicas equal", done.stdout)
        assert loss is not None and float(loss[1]) < 0.1


def test_the_guides_adapter_works(tmp_path):
    text = GUIDE.read_text()
    blocks = re.findall(r"Save this as `build/adapter/(\w+\.py)`:\n```python\n(.*?)```", text, re.S)
    assert [name for name, _ in blocks] == ["averager.py", "train.py"]
    for name, code in blocks:
        (tmp_path / name).write_text(code)
    out = on_two_ranks(str(tmp_path / "train.py"))
    loss, ratio = re.search(r"loss ([\d.]+) ratio ([\d.]+)", out).groups()
    assert float(loss) < 0.05 and float(ratio) > 7
    assert "equal weights: True" in out
