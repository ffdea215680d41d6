"""ParameterServerOptimizer: a training loop of torch whose optimizer runs on a store's servers."""

from __future__ import annotations

from typing import Any

import torch

from thinwire import kvstore
from thinwire.errors import InvalidArgumentError

_MODES = {"local": "local", "sync": "dist_sync", "async": "dist_async"}
_SSP = "ssp:"


class ParameterServerOptimizer:
    """Train `model` with `optimizer`'s rule, applied by servers. Experimental.

    step() pushes gradients and pulls values, the first layers' first (P3, Jayarajan et al., MLSys
    2019), and returns at once: each module's forward waits for its own parameters, so that the rest
    still travels while the first layers compute. Whoever reads parameters in another way calls
    wait() before.

    All workers construct it with the same model and numbers, and start from worker 0's values. In
    mode "sync" the gradient is the mean of all workers'. Numbers that change between steps, such as
    the learning rate of optimizer.param_groups[0], reach the servers by a call that all workers
    wait in, so in the other modes a schedule is one by epoch and not by step.

    Args:
        optimizer: SGD, Adam, AdamW or Adagrad of torch.optim with one group, of model's parameters.
            Its own state stays empty.
        model: whose parameters are float32, bfloat16 or float16, on any device. Buffers are each
            worker's own.
        mode: "sync", "async", "ssp:staleness=k", or "local": this process alone
            (docs/how-to/parameter-server.md).
        codec: of gradients up and values down, with error feedback; None: no compression.
        timeout_s: of meeting and of each wait; None: THINWIRE_TIMEOUT_S, else 60.
        journal: as thinwire.kvstore.create takes it.

    A process that serves does not return from the constructor, as in thinwire.kvstore.create.
    Raises the typed errors of thinwire.kvstore."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model: torch.nn.Module,
        *,
        mode: str = "sync",
        codec: str | None = "int4",
        timeout_s: float | None = None,
        journal: str | None = None,
    ) -> None:
        if not isinstance(model, torch.nn.Module):
            raise InvalidArgumentError(f"model is {model!r}, expected a torch.nn.Module")
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._check_group(optimizer)
        self.optimizer = optimizer
        self._spec = kvstore.optimizer_spec(optimizer)
        self.store = kvstore.create(
            _type_of(mode), codec=codec, timeout_s=timeout_s, journal=journal
        )
        self._sync = mode in ("sync", "local")
        names = list(self._parameters)
        values = [p.data for p in self._parameters.values()]
        self.store.init(names, values)
        self._set_numbers()
        self.store.pull(names, values)
        self._names = {id(p): name for name, p in self._parameters.items()}
        self._hooks = [
            module.register_forward_pre_hook(self._before_forward)
            for module in model.modules()
            if any(p.requires_grad for p in module.parameters(recurse=False))
        ]

    def zero_grad(self) -> None:
        """As torch.optim.Optimizer.zero_grad."""
        self.optimizer.zero_grad()

    def step(self) -> None:
        """Push all gradients and pull the values that they lead to. A parameter without a gradient
        counts as one of zeros in mode "sync", and is only pulled in the others."""
        if kvstore.optimizer_spec(self.optimizer) != self._spec:
            self.wait()
            self._set_numbers()
        for number, (name, parameter) in enumerate(self._parameters.items()):
            gradient = parameter.grad
            if gradient is None and not self._sync:
                self.store.pull(name, parameter.data, priority=-number, wait=False)
                continue
            if gradient is None:
                gradient = torch.zeros_like(parameter)
            self.store.pushpull(name, gradient, out=parameter.data, priority=-number)

    def wait(self) -> None:
        """Block until all parameters have the values that the last step() pulls."""
        self.store.wait()

    def save(self, path: str) -> None:
        """Worker 0 writes values and optimizer states to a file, and each worker its residuals to
        path.worker-RANK; all workers call it."""
        self.wait()
        self.store.save_optimizer_states(path)

    def load(self, path: str) -> None:
        """Read what save() wrote, of the same model and optimizer; all workers call it."""
        self.wait()
        self.store.load_optimizer_states(path)
        self.store.pull(list(self._parameters), [p.data for p in self._parameters.values()])

    def close(self) -> None:
        """Wait, leave the store, and take the hooks off the model. A second call does nothing."""
        if not self._hooks:
            return
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        try:
            self.wait()
        finally:
            self.store.close()

    def _check_group(self, optimizer: Any) -> None:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise InvalidArgumentError(f"optimizer is {optimizer!r}, expected one of torch.optim")
        theirs = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if theirs != {id(p) for p in self._parameters.values()}:
            raise InvalidArgumentError(
                f"the optimizer has {len(theirs)} parameters, expected the {len(self._parameters)} "
                "of model that require a gradient; make it of model.parameters()"
            )

    def _set_numbers(self) -> None:
        rescale = 1 / self.store.num_workers if self._sync else 1.0
        self.store.set_optimizer(self.optimizer, rescale_grad=rescale)
        self._spec = kvstore.optimizer_spec(self.optimizer)

    def _before_forward(self, module: torch.nn.Module, _args: object) -> None:
        for parameter in module.parameters(recurse=False):
            if (name := self._names.get(id(parameter))) is not None:
                self.store.wait(name)


def _type_of(mode: str) -> str:
    if isinstance(mode, str) and (mode in _MODES or mode.startswith(_SSP)):
        return _MODES.get(mode, f"dist_{mode}")
    raise InvalidArgumentError(
        f"mode is {mode!r}, expected 'sync', 'async', 'ssp:staleness=2' or 'local'"
    )
