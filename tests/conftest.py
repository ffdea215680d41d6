"""Sets one thread per process before torch is imported: ranks share the machine's cores, and
spinning threads would take the cores from other tests. Makes the network lab, ranks.py and the
package of this checkout (unless one is installed) importable here and in processes that tests
start."""

import importlib.util
import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parents[1]
added = [str(ROOT), str(ROOT / "tests")]
if importlib.util.find_spec("thinwire") is None:
    added.append(str(ROOT / "integrations" / "python"))
sys.path.extend(added)
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), *added]))
