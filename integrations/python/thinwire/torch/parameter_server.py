"""ParameterServerOptimizer: trains a torch model with an optimizer that a store's servers apply."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import Any

import torch
import torch.utils.data

from thinwire import kvspecs, kvstore, kvworker
from thinwire.arguments import check_flag, check_kind, is_whole, wrong
from thinwire.errors import InvalidArgumentError
from thinwire.torch import private, tensors
from thinwire.torch.optimizer.model_hooks import WAITS, ForwardOrder

_MODES = {"local": "local", "sync": "dist_sync", "async": "dist_async"}
_SSP = "ssp:"
_QUORUM = "sync:"
_EMBEDDINGS = (torch.nn.Embedding, torch.nn.EmbeddingBag)


class ParameterServerOptimizer:
    """Train `model` with `optimizer`'s rule, applied by servers. Experimental.

    Each gradient is pushed as soon as backward() has computed it, and the new values are pulled by
    the same message, the first layers first (P3, Jayarajan et al., MLSys 2019). step() returns at
    once: each module's forward waits for the parameters that it reads, so that communication
    overlaps the first layers' computing. The first forward of `model` shows which parameters each
    module reads. So parameters may change at any time after backward(); to read them otherwise,
    call wait() after step() (model.state_dict() waits by itself). A loop that changes gradients
    before step(), for example by clipping, or calls backward() several times per step must pass
    overlap=False: then step() pushes all gradients, with the same results.

    The weight of an Embedding or EmbeddingBag with sparse=True is row-sparse: step() pushes the
    rows that its gradient has, and its forward pulls the rows that it looks up, and waits for them.
    Other rows are as old as their last use here, until wait() pulls the whole table.

    All workers construct it with the same model and numbers, and start from worker 0's values. In
    mode "sync" the gradient is the mean of all workers' gradients, and in mode
    "sync:quorum=k,grace=s" the mean of a round's pushes by their `weight`. If numbers such as the
    learning rate of optimizer.param_groups[0] change between a step and the next backward(), all
    workers wait for one another while the servers get them; so in the other modes use a schedule by
    epoch and not by step. In mode ssp this happens in the next forward of a module that trains, and
    the worker then pulls the values again, because its gradient would be too old.

    A process that serves does not return from the constructor, as in thinwire.kvstore.create.

    Args:
        optimizer: SGD, Adam, AdamW, Adagrad or SparseAdam (treated as Adam) of torch.optim, with
            one group of the model's parameters. Its own state stays empty. Momentum, moments and
            weight decay of a row-sparse weight change only for the rows that have gradients.
        model: its parameters are float32, bfloat16 or float16, on any device. Buffers are not
            shared between workers. torch.compile makes one graph per module, because forward waits
            for values; fullgraph=True is not supported.
        mode: "sync", "async", "ssp:staleness=k", "sync:quorum=k,grace=s", or "local": only this
            process (docs/how-to/parameter-server.md).
        overlap: push in backward(), and not in step().
        codec: of gradients up and values down, with error feedback; None: no compression.
        timeout_s: seconds, of connecting and of each wait; None: THINWIRE_TIMEOUT_S, else 60.
        journal: as thinwire.kvstore.create takes it.

    Attributes:
        weight: the weight of gradients that are pushed from then on, such as the samples or tokens
            of the next backward(), in mode "sync:quorum=k,grace=s"; 1 in the other modes.

    Raises:
        Error: the typed errors of thinwire.kvstore.create.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model: torch.nn.Module,
        *,
        mode: str = "sync",
        codec: str | None = "int4",
        overlap: bool = True,
        timeout_s: float | None = None,
        journal: str | None = None,
    ) -> None:
        check_kind("model", model, torch.nn.Module, "a torch.nn.Module")
        check_flag("overlap", overlap)
        if private.is_one_graph(model):
            raise InvalidArgumentError(
                "model is compiled with fullgraph=True, but each module's forward waits for the "
                "values that it reads, which is no part of a graph; compile it without fullgraph"
            )
        model = private.uncompiled(model)
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        for name, parameter in self._parameters.items():
            tensors.check_made(parameter, 0, lambda name=name: name)
        self._check_group(optimizer)
        self.optimizer = optimizer
        self._spec = kvspecs.optimizer_spec(optimizer)
        self.store = kvstore.create(
            _type_of(mode), codec=codec, timeout_s=timeout_s, journal=journal
        )
        self.weight: float = 1.0
        self._sync = mode in ("sync", "local")
        self._steps = self._sync or mode.startswith(_QUORUM)  # each worker pushes each parameter
        self._mode = mode
        self._in_forward = mode.startswith(_SSP)  # changed numbers are sent before a forward
        self._begun = False  # True after a forward of this step has begun
        self._shares = 0
        self._priorities = {name: -number for number, name in enumerate(self._parameters)}
        self._names = {id(p): name for name, p in self._parameters.items()}
        embeddings = [m for m in model.modules() if isinstance(m, _EMBEDDINGS) and m.sparse]
        weights = {id(m.weight) for m in embeddings}
        self._tables = [name for name, p in self._parameters.items() if id(p) in weights]
        self._whole = False  # True if all rows of tables were pulled since the last step
        self._read: set[str] = set()  # tables of which rows were pulled since their last push
        self._dense = [name for name in self._parameters if name not in self._tables]
        for names, is_table in ((self._dense, False), (self._tables, True)):
            if names:
                self.store.init(names, self._values(names), row_sparse=is_table)
        self._set_numbers()
        self._pull_all()
        # A module may read more than its own parameters, as attention does. The model's first
        # forward, when nothing is in flight, shows which.
        self._order = ForwardOrder(model, [self._parameters[name] for name in self._dense])
        self._needs: dict[torch.nn.Module, list[str]] = {}
        # These run before the model's own hooks, some of which (weight_norm's) read parameters.
        self._hooks = [
            module.register_forward_pre_hook(self._before_forward, prepend=True, with_kwargs=True)
            for module in model.modules()
        ]
        self._hooks.append(model.register_state_dict_pre_hook(self._before_state_dict))
        # Gradients that backward() has pushed since the last step, with their versions.
        self._pushed: dict[str, tuple[torch.Tensor, int]] = {}
        if overlap:
            for name in self._dense:
                hook = self._parameters[name].register_post_accumulate_grad_hook(self._on_gradient)
                self._hooks.append(hook)

    def zero_grad(self) -> None:
        """Reset the gradients, as torch.optim.Optimizer.zero_grad()."""
        self.optimizer.zero_grad()

    def step(self) -> None:
        """Push the gradients that backward() has not pushed, and pull the resulting values. In mode
        "sync", also with a quorum, a missing gradient counts as zeros; in the other modes the
        parameter is only pulled.

        Raises:
            InvalidArgumentError: a gradient was changed after backward() had pushed it.
        """
        pushed, self._pushed = self._pushed, {}
        for name, (gradient, version) in pushed.items():
            same = self._parameters[name].grad is gradient
            if not same or private.version_of(gradient) != version:
                raise InvalidArgumentError(
                    f"the gradient of '{name}' has changed since backward() pushed it; make the "
                    "optimizer with overlap=False, so that step() pushes"
                )
        if not pushed:
            self._renew_numbers()
        self._whole = self._begun = False
        if not self._needs and self._order.first_use:
            self._needs = self._order.needs({self._parameters[n]: n for n in self._dense})
        for name, parameter in self._parameters.items():
            if name in self._tables:
                self._push_rows(name, parameter, self._priorities[name])
            elif name not in pushed:
                self._push(name, parameter)

    def share(
        self,
        dataset: Sized,
        batch_size: int = 1,
        epochs: int = 1,
        *,
        shuffle: bool = True,
        seed: int = 0,
        collate_fn: Callable[[list], Any] = torch.utils.data.default_collate,
    ) -> Iterator[Any]:
        """Iterate over the batches of `dataset` that this worker trains on. Each batch goes to the
        worker that asks next, so a fast machine gets more batches than a slow one.

        All workers call it with the same arguments; the contents of a batch do not depend on the
        worker. If a worker is lost before a batch's step was applied, the batch is handed out
        again, so each sample of an epoch is trained on once, and more often only if workers were
        lost. At the end a worker waits for the batches of the others. A worker that joins begins
        with the batches that are left. If you leave the loop early, close the optimizer.

        Args:
            dataset: has len() and [index], or __getitems__(indices), as torch's Dataset.
            batch_size: samples per batch; the last batch of an epoch has the rest.
            epochs: how often each sample is handed out.
            shuffle: True: shuffle each epoch by `seed`; False: use the dataset's order.
            seed: the same on all workers.
            collate_fn: makes a batch from a list of samples, as DataLoader's.

        Raises:
            InvalidArgumentError: the mode is "sync", also with a quorum, where all workers make the
                same number of steps; or the arguments differ from those of other workers.
        """
        if self._steps and self._mode != "local":
            raise InvalidArgumentError(
                f"share() in mode '{self._mode}': all workers take as many steps; give each an "
                "equal part by a DistributedSampler, or take mode 'async' or 'ssp:staleness=2'"
            )
        check_flag("shuffle", shuffle)
        for what, value in (("batch_size", batch_size), ("epochs", epochs), ("seed", seed)):
            if not is_whole(value) or value < (what != "seed"):
                raise wrong(what, value, "a whole number above 0")
        if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
            raise InvalidArgumentError(
                f"dataset is {type(dataset).__name__}, expected one with len() and [index]"
            )
        self._shares += 1
        return self._batches(
            self._shares, dataset, batch_size, epochs, seed if shuffle else None, collate_fn
        )

    def _batches(
        self,
        share: int,
        dataset: Any,
        batch_size: int,
        epochs: int,
        seed: int | None,
        collate_fn: Callable[[list], Any],
    ) -> Iterator[Any]:
        size, order, order_epoch = len(dataset), torch.arange(len(dataset)), -1
        for taken in itertools.count():
            # A batch's forward waits for the values of the step before it.
            work = kvworker.take_work(
                self.store, share, size, batch_size, epochs, max(taken - 1, 0)
            )
            if work.waited:
                self._read.clear()
                self._pull_all()
            if work.count == 0:
                return
            if seed is not None and order_epoch != work.epoch:
                draws = torch.Generator().manual_seed(seed + work.epoch)
                order, order_epoch = torch.randperm(size, generator=draws), work.epoch
            indices = order[work.first : work.first + work.count].tolist()
            if hasattr(dataset, "__getitems__"):
                yield collate_fn(dataset.__getitems__(indices))
            else:
                yield collate_fn([dataset[index] for index in indices])

    def wait(self) -> None:
        """Block until all parameters have the values after the last step(), including all rows of
        row-sparse ones."""
        self.store.wait()
        self._pull_tables()

    def save(self, path: str) -> None:
        """Write a checkpoint: worker 0 writes values and optimizer states to a file, and each
        worker its residuals to path.worker-RANK. All workers call it."""
        self.store.wait()
        self.store.save_optimizer_states(path)

    def load(self, path: str) -> None:
        """Load a checkpoint that save() wrote for the same model and optimizer. All workers call
        it."""
        self.store.wait()
        self.store.load_optimizer_states(path)
        self._pull_all()

    def close(self) -> None:
        """Wait, leave the store, and remove the model's hooks. A second call does nothing."""
        if not self._hooks:
            return
        self._order.stop()
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        try:
            self.wait()
        finally:
            self.store.close()

    def _check_group(self, optimizer: Any) -> None:
        check_kind("optimizer", optimizer, torch.optim.Optimizer, "one of torch.optim")
        theirs = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if theirs != {id(p) for p in self._parameters.values()}:
            raise InvalidArgumentError(
                f"the optimizer has {len(theirs)} parameters, expected the {len(self._parameters)} "
                "of model that require a gradient; make it of model.parameters()"
            )

    def _on_gradient(self, parameter: torch.Tensor) -> None:
        name = self._names[id(parameter)]
        if name in self._pushed:
            raise InvalidArgumentError(
                f"backward() has pushed the gradient of '{name}' before in this step; call step() "
                "after each backward(), or make the optimizer with overlap=False"
            )
        if not self._pushed:
            self._renew_numbers()
        self._push(name, parameter)
        gradient = parameter.grad
        assert gradient is not None
        self._pushed[name] = gradient, private.version_of(gradient)

    def _push(self, name: str, parameter: torch.Tensor) -> None:
        gradient, priority = parameter.grad, self._priorities[name]
        if gradient is not None and gradient.is_sparse:
            gradient = gradient.to_dense()  # a sparse gradient that no embedding module made
        if gradient is None and not self._steps:
            self.store.pull(name, parameter.data, priority=priority, wait=False)
            return
        if gradient is None:
            gradient = torch.zeros_like(parameter)
        self.store.pushpull(
            name, gradient, out=parameter.data, priority=priority, weight=self.weight
        )

    def _renew_numbers(self) -> None:
        if not self._in_forward and kvspecs.optimizer_spec(self.optimizer) != self._spec:
            self.store.wait()
            self._set_numbers()

    def _begin_forward(self) -> None:
        """In mode ssp, send changed numbers before a step's first forward, and pull the values
        afterwards: a gradient's age counts from that pull, and the call waits for all workers."""
        self._begun = True
        if kvspecs.optimizer_spec(self.optimizer) != self._spec:
            self.wait()
            self._set_numbers()
            self._read.clear()
            self._pull_all()

    def _set_numbers(self) -> None:
        rescale = 1 / self.store.num_workers if self._sync else 1.0
        self.store.set_optimizer(self.optimizer, rescale_grad=rescale)
        self._spec = kvspecs.optimizer_spec(self.optimizer)

    def _values(self, names: Iterable[str]) -> list[torch.Tensor]:
        return [self._parameters[name].data for name in names]

    def _pull_all(self) -> None:
        self.store.pull(self._dense, self._values(self._dense))
        self._whole = False
        self._pull_tables()

    def _pull_tables(self) -> None:
        if self._whole:
            return
        for name in self._tables:
            table = self._parameters[name].data
            self.store.row_sparse_pull(name, table, row_ids=torch.arange(len(table)))
        self._read.update(self._tables)
        self._whole = True

    def _push_rows(self, name: str, parameter: torch.nn.Parameter, priority: int) -> None:
        gradient = parameter.grad
        if gradient is None and self._steps:
            none = parameter.data.new_empty(1, 0, dtype=torch.int64), parameter.data[:0]
            gradient = torch.sparse_coo_tensor(*none, parameter.shape, check_invariants=False)
        if not self._sync and (gradient is None or name not in self._read):
            # Mode ssp counts a gradient's age from a pull, so each gradient needs one.
            self.store.row_sparse_pull(name, priority=priority, row_ids=[])
        if gradient is not None:
            self.store.push(name, gradient, priority, weight=self.weight)
            self._read.discard(name)

    def _before_forward(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        private.break_graph(WAITS)
        self._wait_for(module, args, kwargs)

    @private.outside_graphs
    def _wait_for(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if not self._hooks:
            return
        if self._in_forward and not self._begun and module.training and torch.is_grad_enabled():
            self._begin_forward()
        for parameter in module.parameters(recurse=False):
            name = self._names.get(id(parameter))
            if name in self._tables:
                self._pull_rows(name, module, args[0] if args else kwargs.get("input"))
            elif name is not None:
                self.store.wait(name)
        for name in self._needs.get(module, ()):
            self.store.wait(name)

    def _before_state_dict(self, *_: Any) -> None:
        if self._hooks:
            self.wait()

    def __reduce__(self) -> tuple[Any, ...]:
        return _in_a_copy, ()  # deepcopy and pickle copy a model with its hooks

    def _pull_rows(self, name: str, module: torch.nn.Module, looked_up: object) -> None:
        """Pull the rows of a table that the forward of a module reads."""
        table = self._parameters[name].data
        if self._whole:
            return
        if not isinstance(module, _EMBEDDINGS) or not isinstance(looked_up, torch.Tensor):
            looked_up = torch.arange(len(table))  # a tied output layer, for example, reads all
        self.store.row_sparse_pull(name, table, row_ids=looked_up)
        self._read.add(name)


def _in_a_copy() -> ParameterServerOptimizer:
    """Return an object for a copy of the model, whose hooks do nothing, as after close()."""
    made = ParameterServerOptimizer.__new__(ParameterServerOptimizer)
    made._hooks = []
    return made


def _type_of(mode: str) -> str:
    if isinstance(mode, str) and (mode in _MODES or mode.startswith((_SSP, _QUORUM))):
        return _MODES.get(mode, f"dist_{mode}")
    raise InvalidArgumentError(
        f"mode is {mode!r}, expected 'sync', 'async', 'ssp:staleness=2', "
        "'sync:quorum=2,grace=0.5' or 'local'"
    )
