"""Across the edge between two steps: the last reductions and the first gathers of the next forward run beside the optimizer.

::

    optimizer.step()      update all parameters ██████████   forward gathers ▒▒░░██████
    StepEdge.step()       update what forward begins with ██ and launch its gathers
                          update the rest           ▒▒▒▒██   forward ██████

``docs/across-steps.md`` says what it rests on.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from overlap_pass.errors import OptionError, TransportError
from overlap_pass.fsdp.convert import make_traceable
from overlap_pass.fsdp.module import READS, UNIT
from overlap_pass.fsdp.unit import Unit
from overlap_pass.transport import ahead
from overlap_pass.transport.ahead import Asked
from overlap_pass.transport.late import finish, putting_off

__all__ = ["SEPARABLE", "StepEdge", "only"]

_log = logging.getLogger("overlap_pass")

SEPARABLE = tuple(
    getattr(torch.optim, name)
    for name in (
        "ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"
    )
)  # fmt: skip
"""Optimizers that update each parameter from its own gradient and its own state, so that some may go before others."""

_PATIENCE = 3
"""Steps after which it is said that no graph has asked for anything."""


class StepEdge:
    """Steps an optimizer in parts, and launches the first gathers of the next forward between them.

    ::

        edge = overlap_pass.StepEdge(model, optimizer)
        for batch in batches:
            loss = model(batch)
            loss.backward()
            edge.step()  # where optimizer.step() stood
            optimizer.zero_grad()

    ``edge.step(loss)`` runs the backward, too, and lets its last reductions run beside the optimizer as well.

    Parameters, states and losses are those of ``optimizer.step()`` bit for bit. All ranks have to run the same calls.

    Args:
        model: under ``fully_shard``; it is made traceable if it is not. Graphs that were compiled before are compiled again.
        optimizer: one of :data:`SEPARABLE`; clipping, accumulation and schedulers stay as they are.

    Raises:
        OptionError: the optimizer may look across parameters, or could round otherwise in parts.
        ConversionError: the model cannot be made traceable.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        _check(optimizer)
        make_traceable(model)
        self.model, self.optimizer = model, optimizer
        self._owner = id(self)
        self._stepping = self._told = False
        self._fruitless = 0
        before, behind = _around_steps(weakref.ref(self))
        self._hooks = (optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(behind))
        self._let(ahead_of_graphs=True)
        # What nobody can take any more is not to be written to when its memory has another owner.
        self._finalizer = weakref.finalize(self, _let_go, self._owner, self._hooks)

    @property
    def under_way_bytes(self) -> int:
        """What is held at the moment for gathers that are launched and not taken."""
        return ahead.under_way_bytes(self._owner)

    def step(self, loss: Tensor | None = None) -> None:
        """What ``optimizer.step()`` does, and the launches.

        Args:
            loss: its backward is run first, and the last reductions of that run beside the optimizer, too. Nobody sees gradients in
                between: not where they are clipped, added up over micro-batches, or read by hooks.

        Raises:
            OptionError: the optimizer has hooks around its steps, which would run for each part.
            TransportError: a gradient was read before it was there; no parameter was updated.
        """
        if not self._finalizer.alive:
            if loss is not None:
                loss.backward()
            self.optimizer.step()
            return
        _check(self.optimizer, ours=len(self._hooks))
        self.drop()
        pending = [] if loss is None else self._backward(loss)
        self._stepping = True
        try:
            self._step_in_parts(pending)
        finally:
            finish(pending)
            self._stepping = False

    def _step_in_parts(self, pending: list[Tensor]) -> None:
        parameters = self._parameters()
        asked = ahead.asked_by(parameters.keys())
        self._note(asked)
        first = {id(parameters[storage]) for one in asked for storage in one.storages}
        late, done = self._of_gradients(pending), set[int]()
        if late:
            done = _half(self.optimizer, first | late)
            with only(self.optimizer, done, inside=True):
                self.optimizer.step()
            finish(pending)
        if first or late:
            with only(self.optimizer, first | late, inside=True):
                self.optimizer.step()
            self._launch(asked, parameters)
        with only(self.optimizer, first | late | done, inside=False):
            self.optimizer.step()

    def _backward(self, loss: Tensor) -> list[Tensor]:
        """What the backward has not waited for: nothing, where somebody could look at gradients before the step."""
        if any(map(_is_watched, self.model.parameters())) or any(unit.accumulates for unit in self._units()):
            if not self._told:
                self._told = True
                _log.warning(
                    "StepEdge.step(loss) waits for all reductions in the backward: a parameter has a gradient already "
                    "(zero_grad(set_to_none=False), micro-batches) or a hook that would see one before it is there"
                )
            loss.backward()
            return []
        with putting_off() as pending:
            loss.backward()
        return pending

    def _of_gradients(self, pending: Sequence[Tensor]) -> set[int]:
        """The parameters whose gradients lie in memory that is not written yet.

        Raises:
            TransportError: one of them does not: somebody has copied what was there.
        """
        owners = {_storage(p.grad): id(p) for p in _of(self.optimizer) if isinstance(p.grad, DTensor)}
        found = {owners.get(tensor.untyped_storage()._cdata) for tensor in pending}
        if None in found:
            raise TransportError(
                "a gradient was read before it was reduced, by a hook or by a parameter that this optimizer does not hold: call "
                "loss.backward() and then StepEdge.step() without the loss"
            )
        return found  # type: ignore[return-value]

    def drop(self) -> None:
        """Wait for what is launched and not taken, and let it go: behind a write to a parameter that changes no version."""
        ahead.drop(self._owner)

    def close(self) -> None:
        """Launch nothing any more: from here on a step is ``optimizer.step()``, and graphs are those without an edge."""
        self._finalizer()
        self._let(ahead_of_graphs=False)

    def _launch(self, asked: Sequence[Asked], parameters: dict[int, DTensor]) -> None:
        for one in asked:
            own = [parameters[storage] for storage in one.storages]
            ahead.launch(one, own, [parameter._local_tensor for parameter in own], self._owner)

    def _parameters(self) -> dict[int, DTensor]:
        """Storage of the shard → parameter, for those that this optimizer alone updates, and frozen ones."""
        updated = {id(parameter) for parameter in _of(self.optimizer)}
        found: dict[int, DTensor] = {}
        for module in self.model.modules():
            for name in module.__dict__.get(READS, ()):
                parameter = module._parameters.get(name)
                if isinstance(parameter, DTensor) and (id(parameter) in updated or not parameter.requires_grad):
                    found[parameter._local_tensor.untyped_storage()._cdata] = parameter
        return found

    def _units(self) -> Iterator[Unit]:
        return (module.__dict__[UNIT] for module in self.model.modules() if UNIT in module.__dict__)

    def _let(self, *, ahead_of_graphs: bool) -> None:
        for unit in self._units():
            unit.ahead = ahead_of_graphs

    def _note(self, asked: Sequence[Asked]) -> None:
        if asked:
            self._fruitless = 0
            return
        self._fruitless += 1
        if self._fruitless == _PATIENCE:
            _log.warning(
                "StepEdge has no effect: in %d steps no compiled forward has asked for a gather. Compile the model with "
                "backend='overlap' or 'overlap_eager' and a strategy other than as_written; where the log names no gather across "
                "the step's edge, the memory budget leaves no room for one",
                _PATIENCE,
            )


def _check(optimizer: Optimizer, ours: int = 0) -> None:
    name = type(optimizer).__name__
    if type(optimizer) not in SEPARABLE:
        known = ", ".join(known.__name__ for known in SEPARABLE)
        raise OptionError(
            f"StepEdge updates some parameters before others, and {name} is not known to update each from its own gradient "
            f"alone: use one of torch's {known}, or optimizer.step()"
        )
    for number, group in enumerate(optimizer.param_groups):
        if group.get("foreach") is None and not group.get("fused") and len(set(map(_kind, group["params"]))) > 1:
            raise OptionError(
                f"param_groups[{number}] of {name} mixes devices or kinds of tensors, so that torch takes one implementation for "
                "all of them and another for a part: say foreach=True or foreach=False"
            )
    hooks = len(optimizer._optimizer_step_pre_hooks) + len(optimizer._optimizer_step_post_hooks) - ours
    if hooks:
        raise OptionError(
            f"{name} has {hooks} hooks around its steps, and StepEdge makes several of one: call what they do before or behind "
            "StepEdge.step(), and close() a StepEdge that the optimizer has already"
        )


def _kind(parameter: Tensor) -> tuple[str, bool]:
    return parameter.device.type, type(parameter) in (nn.Parameter, DTensor, Tensor)


def _of(optimizer: Optimizer) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _half(optimizer: Optimizer, without: Collection[int]) -> set[int]:
    """Half of the elements of the other parameters: so much for the last reductions to hide under, the rest for the first gathers."""
    others = [parameter for parameter in _of(optimizer) if id(parameter) not in without]
    left, found = sum(parameter.numel() for parameter in others) / 2, set()
    for parameter in others:
        if left > 0:
            found.add(id(parameter))
            left -= parameter.numel()
    return found


def _is_watched(parameter: Tensor) -> bool:
    """Whether a gradient is there that the next is added to, or a hook that would see it."""
    return (
        parameter.grad is not None
        or bool(parameter._backward_hooks)
        or bool(getattr(parameter, "_post_accumulate_grad_hooks", None))
    )


def _storage(tensor: DTensor) -> int:
    return int(tensor._local_tensor.untyped_storage()._cdata)


@contextmanager
def only(optimizer: Optimizer, chosen: Collection[int], *, inside: bool) -> Iterator[None]:
    """An optimizer skips parameters without a gradient: take away those of all but the chosen (or of these), and give them back."""
    others = [parameter for parameter in _of(optimizer) if (id(parameter) in chosen) != inside]
    aside = [(parameter, parameter.grad) for parameter in others if parameter.grad is not None]
    for parameter, _ in aside:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in aside:
            parameter.grad = gradient


def _let_go(owner: int, hooks: Sequence[RemovableHandle]) -> None:
    ahead.drop(owner)
    for hook in hooks:
        hook.remove()


def _around_steps(edge: weakref.ref[StepEdge]) -> tuple[Callable[..., None], Callable[..., None]]:
    """Hooks before and behind each step: parameters are written to when no check reads them; and where the step is none of the
    edge's, what that has launched is of no use any more."""

    def before(optimizer: Optimizer, *_: object) -> None:
        for device in {parameter.device for parameter in _of(optimizer)}:
            ahead.join_checks(device)

    def behind(*_: object) -> None:
        found = edge()
        if found is not None and not found._stepping:
            found.drop()

    return before, behind
