"""Row-sparse values of a store: tables of shape (rows, width). A push has some rows, as a sparse
torch tensor, which torch.nn.Embedding(sparse=True) makes; a pull requests some rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from thinwire.arguments import is_whole
from thinwire.errors import InvalidArgumentError
from thinwire.torch import private, tensors

_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def is_sparse(value: object) -> bool:
    """Return whether it is a tensor with a sparse layout."""
    return isinstance(value, torch.Tensor) and value.layout != torch.strided


def table(value: torch.Tensor, rank: int, name: str) -> torch.Tensor:
    """Return the initial value of a row-sparse key, a dense or sparse tensor of shape (rows,
    width), as a dense tensor on the host."""
    if is_sparse(value):
        _check_layout(value, rank, name)
        value = value.detach().to_dense()
    tensors.check(value, rank, lambda: f"key '{name}'")
    if value.ndim != 2 or value.numel() == 0:
        raise InvalidArgumentError(
            f"rank {rank}, key '{name}': a row-sparse value has shape (rows, width), got "
            f"{tuple(value.shape)}; give it two dimensions, or initialise it as a dense one"
        )
    return value.detach().to("cpu").contiguous()


def rows_of(
    parts: Sequence[torch.Tensor], shape: torch.Size, rank: int, name: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rows of tensors of `shape` that will be summed: their numbers (int64, which may
    repeat) and their values, of shape (number of rows, width), both on the host. A dense tensor has
    the rows with an element that is not zero."""
    numbers, values = [], []
    for part in parts:
        if is_sparse(part):
            _check_layout(part, rank, name)
            ids, found = private.parts_of(part.detach())
            tensors.check(found, rank, lambda: f"key '{name}'")
        else:
            tensors.check(part, rank, lambda: f"key '{name}'")
        if part.shape != shape:
            raise InvalidArgumentError(
                f"rank {rank}, key '{name}' has shape {tuple(shape)}, got a tensor of shape "
                f"{tuple(part.shape)}; push one of the key's shape"
            )
        if is_sparse(part):
            ids = ids[0]
        else:
            part = part.detach()
            ids = (part != 0).any(1).nonzero()[:, 0]  # Tensor.to_sparse(1) takes seconds for this
            found = part[ids]
        numbers.append(ids.to("cpu"))
        values.append(found.to("cpu"))
    return torch.cat(numbers).contiguous(), torch.cat(values).contiguous()


def row_ids(ids: object, name: str) -> torch.Tensor:
    """Return the row numbers of a pull as an int64 tensor on the host, of any shape."""
    if isinstance(ids, Sequence) and not isinstance(ids, (str, bytes)):
        right = [i for i in ids if is_whole(i) and -(1 << 63) <= i < 1 << 63]
        if len(right) == len(ids):
            return torch.tensor(right, dtype=torch.int64)
    if isinstance(ids, torch.Tensor) and not is_sparse(ids) and ids.dtype in _INTEGERS:
        return ids.detach().to("cpu", torch.int64).contiguous()
    got = f"a tensor of {ids.dtype}" if isinstance(ids, torch.Tensor) else repr(ids)
    raise InvalidArgumentError(
        f"key '{name}': row_ids is {got}, expected numbers of rows as a tensor of whole numbers or "
        "a list of them"
    )


def check_out(out: object, shape: torch.Size, rank: int, name: str) -> torch.dtype:
    """Return the dtype. InvalidArgumentError unless rows can be written to `out`."""
    if is_sparse(out):
        _check_layout(out, rank, name)
        tensors.check(private.parts_of(out.detach())[1], rank, lambda: f"key '{name}'")
    else:
        tensors.check(out, rank, lambda: f"key '{name}'")
        tensors.check_writable(out, rank, f"key '{name}'")
    if out.shape != shape:
        raise InvalidArgumentError(
            f"rank {rank}, key '{name}' has shape {tuple(shape)}, got an out of shape "
            f"{tuple(out.shape)}; pass one of the key's shape, or none to get the rows alone"
        )
    return out.dtype


def write(out: torch.Tensor, ids: torch.Tensor, rows: torch.Tensor) -> None:
    """Write pulled rows. A dense tensor keeps its other rows; a sparse one has no others."""
    ids, rows = ids.flatten(), rows.reshape(-1, out.shape[1])
    if not is_sparse(out):
        out.index_copy_(0, ids.to(out.device), rows.to(out.device, out.dtype))
        return
    unique, places = torch.unique(ids, return_inverse=True)
    once = rows.new_empty(len(unique), rows.shape[1])
    once[places] = rows  # a row that was requested twice has come twice
    pulled = torch.sparse_coo_tensor(unique[None], once, out.shape, check_invariants=False)
    out.copy_(pulled.coalesce().to(out.device, out.dtype))


def _check_layout(value: torch.Tensor, rank: int, name: str) -> None:
    if value.layout == torch.sparse_coo and value.sparse_dim() == 1 and value.dense_dim() == 1:
        return
    got = f"layout {value.layout}"
    if value.layout == torch.sparse_coo:
        got = f"one with {value.sparse_dim()} sparse and {value.dense_dim()} dense dimensions"
    raise InvalidArgumentError(
        f"rank {rank}, key '{name}': got {got}, expected a sparse COO tensor of whole rows, with "
        "one sparse and one dense dimension, or a dense tensor; pass tensor.to_dense()"
    )
