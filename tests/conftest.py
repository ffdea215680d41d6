"""One thread a process, before torch is imported: ranks share the machine's cores with each other,
and threads that spin for one another take those of the other tests. The network lab is
importable from here and from the processes that tests start."""

import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = str(Path(__file__).resolve().parents[1])
sys.path.append(ROOT)
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), ROOT]))
