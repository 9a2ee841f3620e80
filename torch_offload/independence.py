"""Tests whether an optimizer treats its parameters independently, by stepping tiny CPU copies.

A chunk is updated without the others, so that is what offload needs; it is tested and not listed,
so that classes nobody has heard of here work, or are refused. The copies have the optimizer's
class, attributes and hyper-parameters, and parameters of the same ranks and dtypes. They are
stepped together, one by one, and one by one in the other order: the bits must be the same.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .probe import shareable, snapshot, step_detached, tiny_group, undecorated

_NUM_STEPS = 4
_ADVICE = "Train it without offload, or use an optimizer that updates each parameter by itself."
#: Copies of each rank and dtype in a group, so that one can influence another.
_NUM_COPIES = 2


@dataclass(slots=True)
class _Copy:
    """Tiny parameters, their state and their groups' values, as an optimizer would hold them."""

    params: list[list[torch.nn.Parameter]]
    groups: list[dict[str, Any]]
    attributes: dict[str, Any]
    state: dict[torch.Tensor, dict[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Traits:
    """What the trial found out about an optimizer.

    Attributes:
        sparse: it is one for sparse gradients.
        elementwise: it updates each element by itself, so a parameter may be stepped in parts.
    """

    sparse: bool
    elementwise: bool


def check_independent(
    plain_class: type[torch.optim.Optimizer],
    attributes: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]],
) -> Traits:
    """Refuse an optimizer whose parameters cannot be updated one chunk at a time.

    Args:
        plain_class: the user's optimizer class.
        attributes: its attributes but groups and state.
        groups: its parameter groups.

    Returns:
        What else the trial found out.

    Raises:
        NotImplementedError: it is coupled, needs a closure, keeps tensors of its own, or cannot be
            stepped on the CPU. The message says which and what to do.
    """
    name = plain_class.__name__
    attributes = shareable(attributes)
    if _needs_closure(plain_class):
        raise NotImplementedError(
            f"{name}.step needs a closure, which it may evaluate several times in one step; "
            f"offload updates the parameters once, chunk by chunk. {_ADVICE}"
        )
    owned = _tensor_attributes(attributes)
    if owned:
        raise NotImplementedError(
            f"{name} keeps tensors in its attribute {owned[0]!r}, outside of optimizer.state and "
            f"param_groups, where offload cannot follow. {_ADVICE}"
        )
    trial = _Trial(plain_class, attributes, groups)
    try:
        whole = trial.run(lambda count: [list(range(count))])
    except Exception as error:
        trial.sparse = True
        try:
            whole = trial.run(lambda count: [list(range(count))])
        except Exception:
            raise NotImplementedError(
                f"{name} could not be tried out on a tiny CPU copy, which is how offload finds "
                f"out whether it is safe ({type(error).__name__}: {error}). {_ADVICE}"
            ) from error
    difference = _difference(whole, trial.run(lambda count: [[i] for i in range(count)]))
    if not difference:
        backwards = trial.run(lambda count: [[i] for i in reversed(range(count))])
        difference = _difference(whole, backwards)
        if difference and _difference(whole, trial.run(lambda n: [list(range(n))], seed=1)):
            difference = None  # it draws random numbers, in the order of its parameters
    if difference:
        raise NotImplementedError(
            f"{name} couples its parameters: updated one by one, {difference} is not what it is "
            f"when they are updated together. {_ADVICE}"
        )
    return Traits(sparse=trial.sparse, elementwise=not trial.sparse and trial.is_elementwise(whole))


def _needs_closure(plain_class: type[torch.optim.Optimizer]) -> bool:
    parameters = list(inspect.signature(undecorated(plain_class)).parameters.values())[1:]
    return any(
        p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
        for p in parameters
    )


def _tensor_attributes(attributes: Mapping[str, Any]) -> list[str]:
    def holds_tensors(value: Any, depth: int = 0) -> bool:
        if isinstance(value, torch.Tensor):
            return value.dim() > 0
        if isinstance(value, (torch.nn.Module, torch.optim.Optimizer)):
            return True
        if depth < 3 and isinstance(value, (list, tuple, set, frozenset)):
            return any(holds_tensors(item, depth + 1) for item in value)
        if depth < 3 and isinstance(value, Mapping):
            pairs = [*value.keys(), *value.values()]
            return any(holds_tensors(item, depth + 1) for item in pairs)
        return False

    return [name for name, value in attributes.items() if holds_tensors(value)]


@dataclass(slots=True)
class _Trial:
    """What tiny copies are made of."""

    plain_class: type[torch.optim.Optimizer]
    attributes: Mapping[str, Any]
    groups: Sequence[Mapping[str, Any]]
    sparse: bool = False

    def is_elementwise(self, whole: _Copy) -> bool:
        """Whether each row of a copy gets the bits that it has in ``whole`` when it is stepped as
        a parameter of its own. Where random numbers are drawn they depend on how a tensor is cut,
        on an accelerator if not here."""
        if self.sparse or _difference(whole, self.run(lambda n: [list(range(n))], seed=1)):
            return False
        try:
            rows = self.run(lambda count: [list(range(count))], by_row=True)
        except Exception:
            return False
        pieces = iter(row for params in rows.params for row in params)
        return all(
            _same_in_rows(whole, param, rows, [next(pieces) for _ in range(_num_rows(param))])
            for params in whole.params
            for param in params
        )

    def run(
        self, cut: Callable[[int], list[list[int]]], seed: int = 0, by_row: bool = False
    ) -> _Copy:
        """Step a new copy, in the parts that ``cut`` makes of the positions of its parameters.

        Args:
            cut: number of parameters to the positions in each part.
            seed: of random numbers that a step draws.
            by_row: make a parameter of its own of each row.
        """
        with torch.random.fork_rng(devices=[]), torch.device("cpu"):
            # torch.manual_seed would seed the accelerators too, and dropout with them.
            torch.default_generator.manual_seed(seed)
            copied = _make(self.attributes, self.groups)
            whole = [p for params in copied.params for p in params]
            if by_row:
                copied.params = [
                    [torch.nn.Parameter(row) for p in params for row in _rows(p)]
                    for params in copied.params
                ]
            flat = [(index, p) for index, params in enumerate(copied.params) for p in params]
            for step in range(_NUM_STEPS):
                grads = [self._grad(p, 100 * step + n) for n, p in enumerate(whole)]
                if by_row:
                    grads = [row for grad in grads for row in _rows(grad)]
                for (_, param), grad in zip(flat, grads, strict=True):
                    param.grad = grad
                groups, attributes = copied.groups, copied.attributes
                copied.groups = list(groups)
                for part in cut(len(flat)):
                    members = [flat[position] for position in part]
                    self._step(copied, members, groups, attributes)
        return copied

    def _grad(self, param: torch.Tensor, seed: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        grad = torch.randn(param.shape, generator=generator, dtype=torch.float32).to(param.dtype)
        return grad.to_sparse(1) if self.sparse else grad

    def _step(
        self,
        copied: _Copy,
        members: Sequence[tuple[int, torch.nn.Parameter]],
        groups: Sequence[Mapping[str, Any]],
        attributes: Mapping[str, Any],
    ) -> None:
        """Step some parameters, from the values that groups and attributes had before."""
        stepped = {index: {**snapshot(groups[index]), "params": []} for index, _ in members}
        state: defaultdict[torch.Tensor, dict[str, Any]] = defaultdict(dict)
        for index, param in members:
            stepped[index]["params"].append(param)
            if param in copied.state:
                state[param] = copied.state[param]
        stand_in = step_detached(
            self.plain_class, snapshot(attributes), list(stepped.values()), state
        )
        copied.state.update(state)
        for index, group in stepped.items():
            copied.groups[index] = {k: v for k, v in group.items() if k != "params"}
        copied.attributes = {
            k: v for k, v in stand_in.__dict__.items() if k not in ("state", "param_groups")
        }


def _make(attributes: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> _Copy:
    generator = torch.Generator().manual_seed(0)
    params: list[list[torch.nn.Parameter]] = []
    for group in groups:
        kinds = dict.fromkeys((min(p.dim(), 5), p.dtype) for p in group["params"])
        params.append(
            [
                torch.nn.Parameter(
                    torch.randn([4, 3, 2, 2, 2][:rank], generator=generator).to(dtype)
                )
                for rank, dtype in kinds
                for _ in range(_NUM_COPIES)
            ]
        )
    return _Copy(params, [tiny_group(group) for group in groups], dict(attributes))


def _num_rows(param: torch.Tensor) -> int:
    return len(param) if param.dim() else 1


def _rows(param: torch.Tensor) -> list[torch.Tensor]:
    return (
        [row.clone() for row in torch.split(param.detach(), 1)] if param.dim() else [param.detach()]
    )


def _same_in_rows(
    whole: _Copy, param: torch.Tensor, parts: _Copy, rows: Sequence[torch.Tensor]
) -> bool:
    """Whether a parameter and its state have the bits that its rows have."""

    def joined(values: Sequence[Any]) -> Any:
        return torch.cat([v.detach() for v in values]) if param.dim() else values[0].detach()

    state, states = whole.state.get(param, {}), [parts.state.get(row, {}) for row in rows]
    if any(state.keys() != other.keys() for other in states):
        return False
    return _same(param.detach(), joined(rows)) and all(
        _same(value, joined([other[key] for other in states]))
        if isinstance(value, torch.Tensor) and value.shape == param.shape and value.dim()
        else all(_same(value, other[key]) for other in states)
        for key, value in state.items()
    )


def _difference(whole: _Copy, parts: _Copy) -> str | None:
    """Say what differs in the two, or return None."""
    for group_a, group_b in zip(whole.params, parts.params, strict=True):
        for index, (a, b) in enumerate(zip(group_a, group_b, strict=True)):
            if not _same(a.detach(), b.detach()):
                return f"a parameter of shape {tuple(a.shape)} (number {index})"
            if not _same(whole.state.get(a), parts.state.get(b)):
                return f"the state of a parameter of shape {tuple(a.shape)} (number {index})"
    for first, second in zip(whole.groups, parts.groups, strict=True):
        for key, value in first.items():
            if not _same(value, second.get(key)):
                return f"{key!r} of its parameter group"
    for key, value in whole.attributes.items():
        if isinstance(value, (int, float, torch.Tensor)) and not _same(
            value, parts.attributes.get(key)
        ):
            return f"its attribute {key!r}"
    return None


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        # NaN is a value like any other here.
        return (
            a.dtype == b.dtype
            and a.shape == b.shape
            and torch.equal(a.nan_to_num(), b.nan_to_num())
        )
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(_same, a, b))
    return bool(a is b or a == b)
