"""The operations of Horovod's reductions, and their common arguments."""

from __future__ import annotations

import enum
import math

import torch.distributed as dist

from thinwire.arguments import check_kind, is_number, plain, wrong
from thinwire.errors import InvalidArgumentError, UnavailableError


class Op(enum.Enum):
    """The operation of a reduction."""

    AVERAGE = "mean"
    SUM = "sum"
    MIN = "min"
    MAX = "max"
    PRODUCT = "product"
    ADASUM = "adasum"


Average, Sum, Adasum = Op.AVERAGE, Op.SUM, Op.ADASUM
Min, Max, Product = Op.MIN, Op.MAX, Op.PRODUCT

REDUCE_OPS = {
    Op.AVERAGE: dist.ReduceOp.AVG,
    Op.SUM: dist.ReduceOp.SUM,
    Op.MIN: dist.ReduceOp.MIN,
    Op.MAX: dist.ReduceOp.MAX,
    Op.PRODUCT: dist.ReduceOp.PRODUCT,
}


def op_of(op: object, average: object = None) -> Op:
    """Return the operation that `op` or Horovod's older argument `average` names; by default
    Average.

    InvalidArgumentError if both are given, and for any other value; UnavailableError for Adasum."""
    if average is not None:
        check_kind("average", average, bool, "True, False or None")
        if op is not None:
            raise InvalidArgumentError(
                f"average is {average} and op is {op!r}, expected one of the two; pass op= alone"
            )
        op = Op.AVERAGE if average else Op.SUM
    if op is None:
        return Op.AVERAGE
    check_kind("op", op, Op, "thinwire.horovod.Average, Sum, Min, Max or Product")
    if op is Op.ADASUM:
        raise UnavailableError(
            "op=Adasum is not here; use op=Average with a learning rate for the larger batch, as "
            "for any optimizer"
        )
    return op


def check_factor(name: str, got: object) -> None:
    """InvalidArgumentError unless it is a finite number."""
    if not is_number(plain(got)) or not math.isfinite(got):
        raise wrong(name, got, "a finite number")
