"""Makes the package of this checkout importable when none is installed."""

import importlib.util
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
if importlib.util.find_spec("thinwire") is None:
    sys.path.insert(0, str(HERE.parents[1] / "integrations" / "python"))
