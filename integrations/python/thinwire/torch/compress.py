"""compress: compresses the gradients of any model: DDP, replicate, FSDP2 or a plain module."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer

from thinwire import _library, config
from thinwire.arguments import check_kind
from thinwire.errors import InvalidArgumentError, warn
from thinwire.options import DDP, MODELS, SHARDS, STEPPED
from thinwire.torch import private, tensors
from thinwire.torch.ddp import State, hook
from thinwire.torch.ddp.state import follow_joins, momentum_for
from thinwire.torch.exchange.compression import (
    COMPRESSED,
    Compressed,
    Compression,
    compressed_with,
)
from thinwire.torch.exchange.momentum import has_moved
from thinwire.torch.exchange.rules import DEFAULT, Codec
from thinwire.torch.group import rank_or_0
from thinwire.torch.optimizer import checks
from thinwire.torch.optimizer.module_compression import (
    ModuleCompression,
    OptimizedCompression,
    trained_names,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from thinwire.options import Options


def compress(
    model: torch.nn.Module,
    codec: Codec | None = None,
    *,
    optimizer: Optimizer | None = None,
    process_group: dist.ProcessGroup | None = None,
    **options: Unpack[Options],
) -> Compression:
    """Compress the gradients of a model, from the next backward pass on.

    Call it once on every rank, after wrapping the model:

    - DistributedDataParallel, or a module that torch's composable replicate() was called on: a
      communication hook is registered.
    - FSDP2 (fully_shard was called on the model or its parts): the reduce-scatter of each unit is
      compressed. Each rank keeps residuals of 4 bytes per element of the whole, unsharded model if
      that is at most 1/8 of the available memory on every rank. Otherwise it logs a warning, and
      the default codec is bf16; feedback=True always keeps residuals, feedback=False never does.
      On HSDP's mesh the all-reduce over the replicas is compressed too, or alone (inner=False).
      With tensor or expert parallelism these are the elements of the rank's part of the model;
      units may be sharded over different ranks.
      All parameters of a unit need the same codec. topk, onebit and momentum are errors, because
      they need the whole mean on every rank, except for topk with inner=False. gather="int4" also
      compresses the gathers of parameters, with a copy of the whole model on every rank, 4 bytes
      per element, under the same memory rule.
    - Any other module: hooks are registered on its parameters. The parameters, and the state of
      `optimizer`, are set to those of rank 0 now, and .grad holds the mean of all ranks when
      backward() returns. With `optimizer`, step() returns at once, and each layer waits for its own
      means in the next forward pass.

    Args:
        model: its trained parameters are dense and float32, bfloat16 or float16.
        codec: "int4", "int8", "adaptive", "onebit", "topk:density=0.01", "bf16", "fp32",
            with options ("int8:block=128,rounding=stochastic,down=int4"); or {pattern of parameter
            names: codec}, of which the first match wins; "1d" matches parameters of one dimension
            (biases, norms), "embedding" the weights of embeddings. None: THINWIRE_CODEC, else
            {"1d": "fp32", "*": "int4"}, and for FSDP2 int4, or bf16 without residuals. Or
            "auto": the first steps are measured with fp32; then the codec with the fastest
            predicted step is used, unless it turns out slower. Under FSDP2 (without replicas,
            tensor or expert parallelism) each of fp32, bf16, int8 and int4 is timed instead.
        optimizer: the model's. onebit needs its momentum, and sparse topk is more accurate with it:
            then momentum and weight decay of torch.optim.SGD move into the exchange, and .grad
            after backward() is momentum. onebit with Adam or AdamW is 1-bit Adam
            (arXiv 2102.02888), which requires warm_up_steps; with other codecs warm_up_steps is
            optional. For a plain module, step() of this optimizer uses the means, so it must have
            all trained parameters; such a model cannot be compiled with fullgraph=True. Under
            FSDP2 the optimizer keeps its momentum; create it after fully_shard().
        process_group: for plain modules; None: the default group. DDP and FSDP2 have their own.
        options: the settings in `thinwire.torch.Options`; None means the THINWIRE_* variable, else
            the default.

    Returns:
        The Compression: statistics, checkpoints, recovery, close().

    Raises:
        InvalidArgumentError: the model, the codec or an option is not valid, or the model's
            gradients are compressed already.
        MismatchError: plain modules, optimizers, or their options or those of FSDP2 differ between
            ranks. The options of connections are compared at the first step.
        PeerLostError: a rank did not make the call for a plain module, or under FSDP2.
        UnavailableError: the model is on a GPU, and libthinwire_cuda.so is missing.
    """
    check_kind("model", model, torch.nn.Module, "a torch.nn.Module")
    if optimizer is not None:
        check_kind("optimizer", optimizer, Optimizer, "one of torch.optim, or None")
    one_graph = private.is_one_graph(model)
    if not _is_sharded_root(model):  # fully_shard() may have been called on the compiled module
        model = private.uncompiled(model)
    ddp = isinstance(model, DistributedDataParallel)
    sharded = not ddp and _is_sharded(model)
    hooked = ddp or (not sharded and private.is_replicated(model))
    _check_options(model, options, hooked, sharded, optimizer)
    if not hooked:
        _check_outermost(model)
    _check_first(model, hooked)
    if any(parameter.is_cuda for parameter in model.parameters()):
        _library.cuda_devices(config.cuda_library())
        if options.get("transport") is None and config.resolve().transport == "gloo":
            warn(
                "compress: gradients on a GPU go over TCP, by way of the host; where ranks share a "
                "machine or a fast network, transport='auto' takes NCCL or shared memory"
            )
    # A compressed model and its hooks refer to each other. Without this, a program that makes one
    # after the other keeps the threads, connections and residuals of former ones for long.
    if len(_MADE) > 1:
        gc.collect()
    settings: Any = {name: value for name, value in options.items() if value is not None}
    if sharded:  # its units are marked until close()
        if process_group is not None:
            raise InvalidArgumentError(
                "compress got a process_group for a model under FSDP2, expected none: "
                "fully_shard() has set it"
            )
        from thinwire.torch.fsdp.compression import compress_shards

        if optimizer is not None:
            settings = {**_momentum_of(codec, optimizer, settings), **settings}
            checks.check_own(
                optimizer,
                dict(model.named_parameters()).values(),
                "fully_shard() replaces parameters, so make the optimizer after it",
            )
        shards = compress_shards(model, codec, **settings)
        _MADE.add(shards)
        return shards
    if codec is None and not config.is_set("codec"):
        codec = DEFAULT
    made: Compression
    if hooked:
        made = _hook_on(model, codec, optimizer, process_group, settings)
    elif optimizer is None:
        made = ModuleCompression(model, codec, process_group=process_group, **settings)
    elif one_graph:
        raise InvalidArgumentError(
            "compress got optimizer= and a model that is compiled with fullgraph=True, but with it "
            "each module's forward waits for the values that it reads, which is no part of a "
            "graph; compile it without fullgraph, or leave optimizer= out"
        )
    else:
        settings = {**_momentum_of(codec, optimizer, settings), **settings}
        made = OptimizedCompression(
            model, codec, optimizer, process_group=process_group, **settings
        )
    call = f"compress(model, codec={codec!r})"
    COMPRESSED[made] = Compressed(call, weakref.ref(model), hooked)
    _MADE.add(made)
    return made


# Results of compress() that are still in memory.
_MADE: weakref.WeakSet[Compression] = weakref.WeakSet()


def _is_sharded(model: torch.nn.Module) -> bool:
    """Return whether FSDP2 has sharded a part of the model."""
    return any(map(_is_sharded_root, model.modules()))


def _is_sharded_root(module: torch.nn.Module) -> bool:
    """Return whether fully_shard() was called on this module. Importing FSDP2 takes a second, so
    this does not import it: a program with such a model has done so."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def _hook_on(
    model: Any,
    codec: Codec | None,
    optimizer: Optimizer | None,
    process_group: dist.ProcessGroup | None,
    options: dict[str, Any],
) -> State:
    """Register the communication hook of a DDP model or of a replicated module; return its
    State."""
    ddp = isinstance(model, DistributedDataParallel)
    module, group = (model.module, model.process_group) if ddp else (model, None)
    group = group if ddp else private.replicated_group(model)
    if process_group is not None and process_group is not group:
        raise InvalidArgumentError(
            "compress got another process_group than the model's own; leave it out"
        )
    if getattr(model, "mixed_precision", None) is not None:
        raise InvalidArgumentError(
            "DistributedDataParallel(mixed_precision=...) reduces by a communication hook of its "
            "own, and DDP takes one; leave it out, and take torch.autocast or a bf16 model"
        )
    if ddp and private.has_python_reducer(model):
        raise InvalidArgumentError(
            f"rank {rank_or_0(group)}: compress got a DistributedDataParallel that was made with "
            "torch._dynamo.config.optimize_ddp='python_reducer', which ignores what communication "
            "hooks return; leave that setting at its default, and make the wrapper again"
        )
    ignored = model.parameters_to_ignore if ddp else ()
    names = trained_names(module, group, ignored)
    if optimizer is not None and not any(
        parameter in names for each in optimizer.param_groups for parameter in each["params"]
    ):
        raise InvalidArgumentError(
            f"rank {rank_or_0(group)}: the optimizer has no parameter of this model, expected one "
            "made of model.parameters()"
        )
    options = {
        "structure": tensors.structure_of(module),
        **_momentum_of(codec, optimizer, options),
        **options,
    }
    state = State(codec, group, names=names, **options)
    state.watch(module, ignored)
    if state.config.momentum and optimizer is not None:
        checks.check_own(
            optimizer,
            names,
            "its momentum and weight decay move into the exchange of this model, and those of the "
            "others would be gone; make one optimizer for each model, and leave out parameters "
            "that DDP ignores",
        )
        checks.check_all(
            optimizer,
            names,
            "all gradients become momentum, which the optimizer of these would take for bare ones; "
            "make one optimizer of all that are trained, in several groups if need be",
        )
        state.take_momentum(optimizer)
    if delayed := set(map(id, private.delayed_parameters(model))):
        state.note_bypassed({
            private.plain_name(name): p.numel()
            for name, p in module.named_parameters()
            if id(p) in delayed
        })  # fmt: skip
    try:
        model.register_comm_hook(state, hook)
    except RuntimeError as error:
        state.close()
        raise InvalidArgumentError(
            f"rank {rank_or_0(group)}: the model has a communication hook already, and DDP takes "
            "one and never gives it back; remove the register_comm_hook() call, or, after the "
            "close() of an earlier compress(), wrap the module in a new DistributedDataParallel "
            f"({error})"
        ) from error
    if ddp:
        follow_joins(state, model)
    return state


def _momentum_of(
    codec: Codec | None, optimizer: Optimizer | None, options: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the options for the optimizer's momentum if the codec needs it and the caller has set
    none."""
    if optimizer is None or options.get("momentum") is not None:
        return {}
    if has_moved(optimizer):
        raise InvalidArgumentError(
            "compress got an optimizer without the momentum that it was made with, which has moved "
            "into an exchange: it was passed to compress() before, or has loaded the state of one "
            "that was; make a new optimizer, pass that, and load saved states after it"
        )
    spec = codec if isinstance(codec, Mapping) else config.resolve(codec=codec).codec
    return {} if spec == "auto" else momentum_for(spec, optimizer)


def _check_options(
    model: torch.nn.Module,
    options: Mapping[str, Any],
    hooked: bool,
    sharded: bool,
    optimizer: Optimizer | None,
) -> None:
    config.check_names(name for name in options if name not in MODELS)
    kind = DDP if hooked else SHARDS if sharded else STEPPED if optimizer is not None else ""
    for name, value in options.items():
        expected = MODELS.get(name, (kind,))
        if value is not None and kind not in expected:
            raise InvalidArgumentError(
                f"compress got {name}={value!r} for a {type(model).__name__}, expected "
                f"{' or '.join(expected)}; leave it out"
            )


def _check_outermost(model: torch.nn.Module) -> None:
    """InvalidArgumentError if DDP, replicate() or FSDP1 reduces the gradients of a part of the
    model."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    for name, part in model.named_modules():
        if fsdp is not None and isinstance(part, fsdp.FullyShardedDataParallel):
            raise InvalidArgumentError(
                f"compress got a {type(model).__name__} under FullyShardedDataParallel, expected "
                "one under FSDP2; call torch.distributed.fsdp.fully_shard() on the model in place "
                "of that wrapper"
            )
        ddp = isinstance(part, DistributedDataParallel)
        if ddp or private.is_replicated(part):
            wrapper = "DistributedDataParallel" if ddp else "replicate()"
            raise InvalidArgumentError(
                f"compress got a {type(model).__name__} whose part '{name}' is under {wrapper}, "
                "which reduces its gradients itself; call compress() on that part"
            )


def _check_first(model: torch.nn.Module, hooked: bool) -> None:
    """InvalidArgumentError if gradients of the model, or of a part of it, are compressed already.
    A DDP hook cannot be removed, so a module may be wrapped in a new DDP."""
    for earlier in compressed_with(model):
        if earlier.model() is model or not (hooked and earlier.hooked):
            raise InvalidArgumentError(
                f"compress: the gradients of this {type(model).__name__}, or of a part of it, are "
                f"compressed already, by {earlier.call} of a {type(earlier.model()).__name__}; "
                "remove one of the two calls, or close() what the first returned. To change the "
                "codec of a DDP model, wrap the module again and call compress() on that"
            )
