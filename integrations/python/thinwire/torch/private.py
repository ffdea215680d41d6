"""All uses of torch's private names and behaviour in this package.

Each function says why it needs them, and for which versions of torch this was checked. No other
file of the package uses a private name of torch; tests/integrations/python/test_private_names.py
checks that. When a new torch breaks something here, this is the only file to fix."""

from __future__ import annotations

import atexit
import contextlib
import datetime
import inspect
import queue
import sys
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterator
from types import CodeType, MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend as _Backend
from torch.distributed import distributed_c10d
from torch.distributed._composable import replicate
from torch.distributed._composable.contract import _get_registry
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from thinwire.errors import Error, UnavailableError, again


def store_of(group: dist.ProcessGroup) -> dist.Store:
    """Return the rendezvous store that a process group was created with.

    Ranks exchange their addresses through it. torch has no public way from a group to its store;
    distributed_c10d._world.pg_map maps a group to (backend, store) in torch 2.13 and 2.14.
    UnavailableError if it does not."""
    try:
        return distributed_c10d._world.pg_map[group][1]
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise UnavailableError(
            f"torch {torch.__version__} does not keep the store of a process group where torch "
            "2.13 and 2.14 keep it; take one of these, or a newer thinwire"
        ) from error


def timeout_of(group: dist.ProcessGroup) -> float | None:
    """Return the timeout, in seconds, of the group's own collectives; None if its backend has none.

    Compressed collectives have the same deadline unless the user sets one. torch has no public way
    to it; Gloo's and NCCL's backends keep it in options._timeout in torch 2.1 to 2.14."""
    for device in ("cpu", "cuda"):
        with contextlib.suppress(AttributeError, RuntimeError):
            return group._get_backend(torch.device(device)).options._timeout.total_seconds()
    return None


def keep_former_group(owner: object, group: dist.ProcessGroup) -> None:
    """Keep alive a torch group that `owner` has left, until it leaves another one or is collected.

    A DDP model that is collected after destroy_process_group() holds the last reference to its
    group, and destroys it with the GIL held. That joins Gloo's threads, one of which may need the
    GIL, or wait for a collective that a peer never joins (torch 2.13). If Python holds the last
    reference, it releases the GIL, and the thread that drops it here may wait without end.

    The process's exit waits until the groups that were handed over are destroyed, as it waits for
    calls in_torch(): if a peer answers a group that still exists, Gloo's threads need the GIL, and
    objects of torch that the exit has destroyed (torch 2.13)."""
    with _keeper_lock:
        if _keeper.ident is None:
            _keeper.start()
    _hand_over(id(owner), group)
    weakref.finalize(owner, _hand_over, id(owner), None).atexit = False


@contextlib.contextmanager
def in_torch() -> Iterator[None]:
    """A context for torch calls on a daemon thread. The process's exit waits for calls that have
    begun, up to _EXIT_WAIT_S for all together; a thread that begins one afterwards is ended. A call
    that waits longer for a peer is abandoned.

    Before 3.14, Python unwinds a thread that returns to it while the process exits. Torch 2.13 and
    2.14 take the GIL again in a destructor, where the unwinding makes C++ abort the process."""
    thread = threading.current_thread()
    _in_torch.add(thread)
    try:
        if _exits.is_set():
            raise SystemExit
        yield
    finally:
        _in_torch.discard(thread)


@atexit.register
def _wait_for_torch() -> None:
    _exits.set()
    end = time.monotonic() + _EXIT_WAIT_S
    # After a fork the parent's threads are still listed, but are not alive.
    while time.monotonic() < end and (
        any(thread.is_alive() for thread in list(_in_torch))
        or (_handed_over and _keeper.is_alive())
    ):
        time.sleep(0.01)
    _has_waited.set()


_EXIT_WAIT_S = 2.0
_exits, _has_waited = threading.Event(), threading.Event()
_in_torch: set[threading.Thread] = set()


def _hand_over(owner: int, group: dist.ProcessGroup | None) -> None:
    _handed_over.append(owner)
    _to_keep.put((owner, group))


def _keep_groups() -> None:
    while True:
        owner, group = _to_keep.get()
        if _has_waited.is_set():
            # Wait for the end of the process: this frame may be the last to hold the group.
            threading.Event().wait()
        _former_groups[owner] = group  # drops the owner's former group
        if group is None:
            del _former_groups[owner]
        _handed_over.pop()


# One entry per item that the keeper has not finished.
_handed_over: list[int] = []
_to_keep: queue.SimpleQueue[tuple[int, dist.ProcessGroup | None]] = queue.SimpleQueue()
_former_groups: dict[int, dist.ProcessGroup | None] = {}
_keeper_lock = threading.Lock()
_keeper = threading.Thread(target=_keep_groups, name="thinwire-former-groups", daemon=True)


def parts_of(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the indices and values of a sparse tensor, uncoalesced: indices may repeat.

    indices() and values() require a coalesced tensor, and coalesce() sums 16-bit floats in 16 bits,
    but a store sums them in fp32. Torch 2.13 and 2.14 have _indices() and _values()."""
    return tensor._indices(), tensor._values()


def version_of(tensor: torch.Tensor) -> int:
    """Return the number of in-place changes of a tensor.

    It tells whether a gradient was changed after it had been sent. autograd uses Tensor._version
    for the same purpose, and torch 2.13 and 2.14 have it."""
    return tensor._version


def plain_name(name: str) -> str:
    """Return a parameter's name without the prefix that torch.compile adds to it.

    torch.compile(module) keeps the module as its attribute _orig_mod, so that names of parameters
    differ between a compiled model and the same one uncompiled. Torch 2.13 and 2.14."""
    return name.replace("_orig_mod.", "")


def uncompiled(module: torch.nn.Module) -> torch.nn.Module:
    """Return the module inside the result of torch.compile(module), whose hooks torch.compile can
    trace; any other module unchanged. Torch 2.13 and 2.14."""
    return getattr(module, "_orig_mod", module)


def is_one_graph(module: torch.nn.Module) -> bool:
    """Return whether it is the result of torch.compile(module, fullgraph=True), where no hook can
    run outside the graph. Torch 2.13 and 2.14 have dynamo_ctx.fullgraph."""
    return getattr(getattr(module, "dynamo_ctx", None), "fullgraph", False) is True


def break_graph(why: str) -> None:
    """Break the graph here, in a hook of a module that torch.compile traces; elsewhere a no-op.

    Under fullgraph=True torch raises an error that contains `why`. torch.compiler has no such
    function. Torch 2.13 and 2.14."""
    if torch.compiler.is_compiling():
        torch._dynamo.graph_break(msg=why)


def outside_graphs(hook: Callable[..., None]) -> Callable[..., None]:
    """Return a hook that torch.compile does not trace, but calls between graphs.

    torch.compiler.disable imports torch._dynamo at once, which takes a second; torch.optim
    decorates its methods with this function. Torch 2.13 and 2.14."""
    return torch._disable_dynamo(hook)


def has_python_reducer(ddp: torch.nn.parallel.DistributedDataParallel) -> bool:
    """Return whether DDP reduces by functional collectives, which torch.compile can trace. It then
    calls hooks with single gradients, and ignores what they return.

    DDP reads torch._dynamo.config.optimize_ddp when it is made, and has no public way to the
    result. Torch 2.13 and 2.14 keep it in _use_python_reducer."""
    return getattr(ddp, "_use_python_reducer", False) is True


def delayed_parameters(ddp: torch.nn.parallel.DistributedDataParallel) -> list[torch.Tensor]:
    """Return the parameters of DDP's delay_all_reduce_named_params, which DDP reduces itself.

    DDP has no public way to them, and no hook gets them. Torch 2.13 and 2.14 keep them in
    _delay_all_reduce_params; empty in other versions."""
    return list(getattr(ddp, "_delay_all_reduce_params", ()))


def after_backward(function: Callable[[], None]) -> None:
    """Call `function` once at the end of the present backward pass.

    autograd has no public callback for that; DDP and FSDP2 use this one. Torch 2.1 to 2.14."""
    torch.autograd.Variable._execution_engine.queue_callback(function)


# The base class of a backend's options, which DeviceMesh checks for; torch 2.9 to 2.14.
BackendOptions = _Backend.Options

# FSDP2's autograd function that reduces the gradients of a unit, torch 2.6 to 2.14.
_GRADIENT_NODES = ("torch::autograd::AccumulateGrad", "RegisterPostBackwardFunctionBackward")


def reduces_gradients() -> bool:
    """Return whether this thread is reducing gradients of parameters in a backward pass: in a hook
    of a parameter (where DDP reduces), in FSDP2's, or in a callback at the end. False inside a
    module's own backward function, such as SyncBatchNorm's.

    autograd has no public API for this. Torch 2.1 to 2.14."""
    if torch._C._current_graph_task_id() < 0:
        return False
    node = torch._C._current_autograd_node()
    return node is None or node.name() in _GRADIENT_NODES


def outside_transforms() -> contextlib.AbstractContextManager[object]:
    """Return a context whose operations are none of a torch.func transform that runs, which allows
    no change of tensors from outside it. Torch 2.1 to 2.14."""
    return torch._C._DisableFuncTorch()


def in_backward() -> bool:
    """Return whether a backward pass runs on this thread; autograd has no public API for this.
    Torch 2.1 to 2.14."""
    return torch._C._current_graph_task_id() >= 0


def backward_pass() -> int:
    """Return the number of the backward pass that runs on this thread; below 0 if none does. A pass
    that a backward function starts, as a reentrant checkpoint does, has its own number. Torch 2.1
    to 2.14."""
    return torch._C._current_graph_task_id()


def in_inner_backward() -> bool:
    """Return whether a backward function has started the backward pass that runs on this thread.

    The only sign is the stack frame of the method by which autograd calls such a function. Torch
    2.1 to 2.14; apply_boxed is new in 2.13."""
    functions = torch.autograd.function.BackwardCFunction
    methods = (functions.apply, getattr(functions, "apply_boxed", functions.apply))
    return _is_called_by({method.__code__ for method in methods})


def gathered_dtype(module: torch.nn.Module) -> torch.dtype | None:
    """Return the dtype in which FSDP2 gathers a module's parameters: the param_dtype of its
    MixedPrecisionPolicy; None: the parameters' own dtype.

    FSDP2 has no public way to the policy of a module. Torch 2.6 to 2.14 keep it in _mp_policy of
    the module's state."""
    policy = getattr(module._get_fsdp_state(), "_mp_policy", None)
    return getattr(policy, "param_dtype", None)


def sharded_together(module: torch.nn.Module) -> tuple[torch.nn.Module, ...]:
    """Return the modules of the fully_shard() call of this module, which takes one or a list.

    FSDP2 has no public way to them. Torch 2.13 keeps them in _modules of the module's state."""
    return tuple(getattr(module._get_fsdp_state(), "_modules", (module,)))


def _parameter_groups(module: torch.nn.Module) -> list[Any]:
    """Return FSDP2's objects for the parameters that one fully_shard() call manages. Torch 2.6 to
    2.12 have one such object, 2.13 a list."""
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    return [state._fsdp_param_group] if groups is None else list(groups)


def gathers_in_parts(module: torch.nn.Module) -> bool:
    """Return whether FSDP2 keeps a part of a unit's weights after a forward pass, and gathers them
    in a smaller group for backward: fully_shard(reshard_after_forward=N). Torch 2.6 to 2.14."""
    for group in _parameter_groups(module):
        later = getattr(group, "post_forward_mesh_info", None)
        if later is not None and later.shard_mesh_size != group.mesh_info.shard_mesh_size:
            return True
    return False


def leave_replicas_to_hook(module: torch.nn.Module) -> None:
    """Make FSDP2 reduce a unit of HSDP over its shards only, so that the hook of
    set_all_reduce_hook() gets the sum and reduces it over the replicas.

    FSDP2 calls dist.all_reduce there, on the mesh's group, and has no public way to replace it.
    UnavailableError if this torch lacks the attributes that torch 2.6 to 2.14 have."""
    try:
        from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo

        for group in _parameter_groups(module):
            info = group.mesh_info
            group.mesh_info = FSDPMeshInfo(info.mesh, shard_mesh_dim=info.shard_mesh_dim)
    except (AttributeError, ImportError, TypeError) as error:
        raise UnavailableError(
            f"torch {torch.__version__} reduces over HSDP's replicas otherwise than torch 2.6 to "
            "2.14; shard over the inner dimension of the mesh, and pass the group of the outer one "
            "as replicas="
        ) from error


def all_reduces_now(module: torch.nn.Module) -> bool:
    """Return the value of an FSDP2 module's set_requires_all_reduce(), which FSDP2 itself uses only
    if it reduces over replicas. Torch 2.6 to 2.14."""
    return all(getattr(group, "all_reduce_grads", True) for group in _parameter_groups(module))


def divide_factor(module: torch.nn.Module) -> float | None:
    """Return the value of an FSDP2 module's set_gradient_divide_factor(): the divisor of sums over
    all ranks, replicas included. Torch 2.6 to 2.14."""
    return getattr(_parameter_groups(module)[0], "gradient_divide_factor", None)


def gathered_unit() -> object | None:
    """Return the object of the FSDP2 unit whose parameters this thread gathers now, the same object
    in every gather; None if this thread gathers none.

    FSDP2 calls the public dist.all_gather_single there; only the stack frame of the caller shows
    the unit. Torch 2.6 to 2.14."""
    from torch.distributed.fsdp._fully_shard._fsdp_collectives import foreach_all_gather

    gathering = inspect.unwrap(foreach_all_gather).__code__
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is gathering:
            return frame.f_locals["fsdp_params"][0]
        frame = frame.f_back
    return None


def shadowed_backward() -> object | None:
    """Return an object that identifies another rank's backward pass, in which this rank takes part
    with zeros because its own inputs have ended; None otherwise. Each pass has a new object.

    `with ddp.join()` reduces such buckets outside of any backward pass; only the stack frame of the
    caller shows it. Torch 2.1 to 2.14."""
    shadow = DistributedDataParallel._match_all_reduce_for_bwd_pass.__code__
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code is shadow:
            return frame.f_locals.get("grad_buckets")
        frame = frame.f_back
    return None


def replace_step(optimizer: torch.optim.Optimizer, step: Callable[[Any], Any]) -> None:
    """Make optimizer.step(closure) call step(closure).

    A learning-rate scheduler replaces step() of an optimizer by a wrapper that sets _opt_called,
    and warns if it later finds step() without the wrapper's mark. Torch 2.1 to 2.14."""

    def replaced(self: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        self._opt_called = True
        return step(closure)

    if hasattr(optimizer.step, "_wrapped_by_lr_sched"):
        replaced._wrapped_by_lr_sched = True
    optimizer.step = MethodType(replaced, optimizer)


def is_stepped_by_scaler() -> bool:
    """Return whether a torch.amp.GradScaler calls the optimizer's step() on this thread.

    It unscales gradients in place, which does not count as a change (version_of()), or lets a fused
    optimizer unscale them; only the stack frame of its step() shows that. Torch 2.3 to 2.14."""
    return _is_called_by({torch.amp.GradScaler.step.__code__})


def _is_called_by(codes: Collection[CodeType]) -> bool:
    """Return whether one of these functions is running on this thread."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code in codes:
            return True
        frame = frame.f_back
    return False


def step_hooks(optimizer: torch.optim.Optimizer) -> list[Callable[..., Any]]:
    """Return the hooks of register_step_pre_hook() and register_step_post_hook().

    torch has no public way to them; 2.13 and 2.14 keep them in these dicts."""
    return [
        *optimizer._optimizer_step_pre_hooks.values(),
        *optimizer._optimizer_step_post_hooks.values(),
    ]


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether the optimizer has step hooks, those of all optimizers included. A step with
    hooks must not be tried and undone."""
    return bool(
        step_hooks(optimizer) or _global_optimizer_pre_hooks or _global_optimizer_post_hooks
    )


def replicated_group(module: torch.nn.Module) -> dist.ProcessGroup | None:
    """Return the process group of a module that torch's composable replicate() was called on.

    replicate() creates its DDP model in the first forward pass; until then its arguments are in the
    state of the module. Torch 2.1 to 2.14."""
    arguments = replicate.state(module)._init_kwargs
    mesh = arguments.get("device_mesh")
    return arguments.get("process_group") if mesh is None else mesh.get_group()


def reducing_ddp() -> torch.nn.parallel.DistributedDataParallel | None:
    """Return the DDP model whose forward pass is under way, or None if there is none, or if its
    backward pass will not reduce gradients. Torch 2.1 to 2.14."""
    ddp = torch.nn.parallel.DistributedDataParallel._active_ddp_module
    return ddp if ddp is not None and ddp.require_backward_grad_sync else None


def is_replicated(module: torch.nn.Module) -> bool:
    """Return whether torch's composable replicate() was called on the module. Torch 2.1 to 2.14."""
    registry = _get_registry(module)
    return registry is not None and "replicate" in registry


def divides_by_those_left(ddp: torch.nn.parallel.DistributedDataParallel) -> bool:
    """Return whether the model is in `with ddp.join(divide_by_initial_world_size=False)`.

    DDP applies that only to its own allreduce, and does not tell a hook. Torch 2.1 to 2.14."""
    return ddp._join_config.enable and not ddp._divide_by_initial_world_size


# The methods of a group that torch.distributed and DDP call, except allreduce. Some have private
# names, and torch 2.13 has new names for those; methods that this torch lacks are left out.
COLLECTIVES = tuple(
    name
    for name in (
        "_allgather_base", "_end_coalescing", "_get_sequence_number_for_group",
        "_reduce_scatter_base", "_set_sequence_number_for_group", "_start_coalescing",
        "all_gather_single", "all_gather_single_coalesced", "all_to_all_single", "allgather",
        "allgather_coalesced", "allgather_into_tensor_coalesced", "alltoall", "alltoall_base",
        "barrier", "broadcast", "gather", "monitored_barrier", "recv", "recv_anysource", "reduce",
        "reduce_scatter", "reduce_scatter_single", "reduce_scatter_single_coalesced",
        "reduce_scatter_tensor_coalesced", "scatter", "send",
    )
    if hasattr(dist.ProcessGroup, name)
)  # fmt: skip

# The gathers with one input and one output tensor: (output, input, options).
ALL_GATHERS = ("_allgather_base", "all_gather_single")
REDUCE_SCATTERS = ("_reduce_scatter_base", "reduce_scatter_single")


def gloo_group(
    store: dist.Store, rank: int, size: int, timeout: datetime.timedelta
) -> dist.ProcessGroup:
    """Return a process group over Gloo that is not in torch's registry of groups.

    torch.distributed.new_group requires a default group, and gives every group a name and a number
    that all ranks of the default group count. ProcessGroupGloo is public, but only a ProcessGroup
    that it is registered with has all collectives. Torch 2.6 to 2.14; UnavailableError before."""
    gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
    try:
        group = dist.ProcessGroup(store, rank, size)
        group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        gloo._set_sequence_number_for_group()
        for device in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
            group._register_backend(torch.device(device), dist.ProcessGroup.BackendType.GLOO, gloo)
        # If a rank left at once, the other ranks could not finish connecting.
        group.barrier().wait()
    except (AttributeError, TypeError) as error:
        raise UnavailableError(
            f"torch {torch.__version__} makes process groups otherwise than torch 2.6 to 2.14; "
            "take one of these"
        ) from error
    return group


def gloo_of(group: dist.ProcessGroup) -> dist.ProcessGroupGloo:
    """Return the backend of a gloo_group(). Torch 2.6 to 2.14."""
    return group._get_backend(torch.device("cpu"))


def share_backend(source: dist.ProcessGroup, target: dist.ProcessGroup) -> None:
    """Register the backend of a gloo_group() with another group, too.

    torch's C++ code gets the backend of a device from a group without calling the Python methods,
    and keeps names and sequence numbers there. A group never changes its first backend, so after
    another configure() it still has that of its first ranks. Torch 2.13 and 2.14."""
    kind = dist.ProcessGroup.BackendType.GLOO
    target._set_default_backend(kind)
    for device in source._device_types:
        target._register_backend(device, kind, source._get_backend(device))


class _Failure:
    """The value of a failed future.

    DDP's reducer (reducer.cpp, parseHookResult) takes the value of a hook's future and prints it,
    because it is no tensor; printing raises the typed error, so backward() raises it. The future's
    set_exception would turn every error into a RuntimeError there. Torch 2.13 and 2.14."""

    def __init__(self, error: Error) -> None:
        self.error = error

    def throw(self) -> None:
        raise again(self.error)

    def __str__(self) -> str:
        self.throw()
        return ""

    def __reduce__(self) -> tuple[object, ...]:
        # A future of GPU tensors pickles its value to find tensors in it.
        return str, ()


def fail_future(future: torch.futures.Future, error: Error) -> None:
    """Complete a future so that its wait(), its value() and its use by DDP raise `error`.

    Future.set_exception would lose the error's type in DDP. torch's own RPC uses
    Future._set_unwrap_func to raise typed errors from wait(); torch 2.13 and 2.14 have it."""
    future._set_unwrap_func(_Failure.throw)
    future.set_result(_Failure(error))
