"""Horovod's functions that tell what it was built with, answered for thinwire."""

from __future__ import annotations

import torch

from thinwire import _library, config
from thinwire.errors import Error


def gloo_built() -> bool:
    """True: Gloo is part of thinwire."""
    return True


def gloo_enabled() -> bool:
    """True: ranks connect over Gloo."""
    return True


def nccl_built() -> bool:
    """True if a libnccl that thinwire can use is installed (for transport="nccl")."""
    try:
        return bool(_library.nccl_version(config.nccl_library()))
    except Error:
        return False


def mpi_built() -> bool:
    """False: MPI may launch the ranks, but transfers no data."""
    return False


def mpi_enabled() -> bool:
    """False, as mpi_built()."""
    return False


def mpi_threads_supported() -> bool:
    """False, as mpi_built()."""
    return False


def cuda_built() -> bool:
    """True if torch can use a GPU."""
    return torch.cuda.is_available()


def rocm_built() -> bool:
    """False: there are no kernels for ROCm."""
    return False


def ccl_built() -> bool:
    """False."""
    return False


def ddl_built() -> bool:
    """False."""
    return False
