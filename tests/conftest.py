"""One thread a process, before torch is imported: ranks share the machine's cores with each other,
and threads that spin for one another take those of the other tests."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
