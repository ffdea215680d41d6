"""Where a process stands among all: rank, size and rendezvous, of whichever launcher started it.

    import thinwire.launch
    place = thinwire.launch.setup()  # under torchrun, srun, mpirun, ...; sets torch's variables
    torch.distributed.init_process_group("gloo")

`thinwire run` starts processes where there is no launcher but ssh. Nothing here needs torch."""

from __future__ import annotations

from thinwire.launch.launchers import find, launched, setup
from thinwire.launch.place import Place

__all__ = ["Place", "find", "launched", "setup"]
