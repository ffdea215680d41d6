"""The guide's program that recovers, and its code for new adapters, run as printed."""

import re
from pathlib import Path

from ranks import run_program, torchrun

ROOT = Path(__file__).resolve().parents[3]
GUIDE = ROOT / "docs" / "guides" / "add-a-framework.md"
# Replacements in the example: processes that would import torch again, and times.
WITHOUT_TIMES = {
    'get_context("spawn")': 'get_context("fork")',
    "time.sleep(SETTLE_S)": 'store.wait([f"alive {generation} {rank}" for rank in (0, 2)])',
    "timeout_s=10": "timeout_s=100",
}


def test_two_ranks_go_on_when_one_is_killed(tmp_path):
    text = (ROOT / "integrations" / "examples" / "recover.py").read_text()
    for part, other in WITHOUT_TIMES.items():
        assert text.count(part) == 1
        text = text.replace(part, other)
    (tmp_path / "recover.py").write_text(text)
    printed = run_program(tmp_path / "recover.py", world=1)
    assert "exit codes: [0, -9, 0]" in printed, printed
    for rank in (0, 2):
        loss = re.search(rf"rank {rank}: 60 steps, loss ([\d.]+), replicas equal", printed)
        assert loss is not None and float(loss[1]) < 0.1


def test_the_guides_adapter_works(tmp_path):
    text = GUIDE.read_text()
    blocks = re.findall(r"Save this as `build/adapter/(\w+\.py)`:\n```python\n(.*?)```", text, re.S)
    assert [name for name, _ in blocks] == ["averager.py", "train.py"]
    for name, code in blocks:
        (tmp_path / name).write_text(code)
    out = torchrun(tmp_path / "train.py")
    loss, ratio = re.search(r"loss ([\d.]+) ratio ([\d.]+)", out).groups()
    assert float(loss) < 0.05 and float(ratio) > 7
    assert "equal weights: True" in out
