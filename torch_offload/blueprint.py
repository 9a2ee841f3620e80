"""Decides what tiny copies of an optimizer are made of: which groups, which parameters. No steps.

Vocabulary: a *blueprint* says how to make a tiny copy, a *sample* one tiny parameter of it, and a
*cut* how the samples are made into parameters: whole, or in pieces along one dimension.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from .distributed import local
from .probe import tiny_group

#: By rank. Two of these of each kind of parameter, so that one can influence the other. Halves of
#: them are whole vector registers, or torch's CPU kernels would round the rest in another way.
_EVEN = ((), (128,), (2, 64), (2, 4, 16), (2, 4, 4, 4), (2, 4, 4, 2, 2))
#: And one of odd sizes.
_ODD = ((), (37,), (7, 37), (7, 5, 3), (3, 5, 3, 3), (3, 5, 3, 2, 2))
#: Once: some classes take other paths from 128 in a dimension on, or for whole blocks of 256.
_LARGE = (128, 128)
#: Lengths of parameters that are much longer in one dimension than in the others.
_LONG, _SHORT = 256, 4
#: From how many different values on a setting is a label or a number, and no switch.
_MAX_CHOICES = 4


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """One tiny parameter.

    Attributes:
        index: its position in the blueprint.
        group: index of its tiny group.
        copy: number among those of its kind in the group.
        is_odd: whether its sizes are.
        is_large: whether it is the one large one.
        source: a parameter of the user's that has its class, attributes and dtype.
        name: what the user's group calls the source, if it has names.
        shape: of the tiny one.
        reversed_strides: whether its first dimension is the innermost in memory.
    """

    index: int
    group: int
    copy: int
    is_odd: bool
    is_large: bool
    source: torch.Tensor
    name: str | None
    shape: tuple[int, ...]
    reversed_strides: bool

    @property
    def is_frozen(self) -> bool:
        """Whether it is of a dtype for weights that are never trained, as quantised ones are."""
        return is_frozen(self.source)

    def values(self, seed: int) -> torch.Tensor:
        """Return random numbers of its shape and dtype."""
        generator = torch.Generator().manual_seed(1000 * seed + self.index)
        shape = self.shape[::-1] if self.reversed_strides else self.shape
        if self.is_frozen:  # hardly any operation knows the dtype
            return torch.zeros(self.shape, dtype=self.source.dtype)
        kind = torch.complex64 if self.source.is_complex() else torch.float32
        made = torch.randn(shape, generator=generator, dtype=kind).to(self.source.dtype)
        return made.permute(*reversed(range(made.dim()))) if self.reversed_strides else made

    def split(self, tensor: torch.Tensor, in_pieces: bool) -> tuple[torch.Tensor, ...]:
        """Cut a tensor of its shape in two, along ``dim``."""
        if not in_pieces or not self.shape:
            return (tensor,)
        length = self.shape[self.dim]
        first = length // 3 if self.is_odd else length // 2
        return torch.split(tensor, [first, length - first], self.dim)

    @property
    def dim(self) -> int:
        """The dimension to cut: the outermost in memory, or the innermost for odd sizes."""
        return max(len(self.shape) - 1, 0) if self.is_odd != self.reversed_strides else 0


@dataclass(slots=True)
class Blueprint:
    """What tiny copies are made of.

    Attributes:
        plain_class: the user's optimizer class.
        attributes: the optimizer's attributes but groups and state; to be copied.
        groups: settings of the tiny groups; to be copied.
        samples: the tiny parameters, group by group.
        sparse: with sparse gradients.
        constructed: the class's constructor makes the first state.
        gaps: how gradients are missing: 0 never, 1 of some parameters, 2 of all in one step.
        turns: how hyper-parameters change in the middle: 0 not at all, 1 a learning rate of zero
            becomes another, 2 those of each group become others.
        ages: whether counters are moved far ahead towards the end.
    """

    plain_class: type[torch.optim.Optimizer]
    attributes: Mapping[str, Any]
    groups: list[dict[str, Any]]
    samples: list[Sample] = field(default_factory=list)
    sparse: bool = False
    constructed: bool = False
    gaps: int = 2
    turns: int = 2
    ages: bool = True


def draw(
    plain_class: type[torch.optim.Optimizer],
    attributes: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]],
) -> Blueprint:
    """Plan tiny copies of an optimizer, with every setting and kind of parameter that it has."""
    chosen = _representatives(groups)
    if len(chosen) == 1:
        chosen *= 2  # classes may confuse groups, and more can be added later
    num_params = sum(len(group["params"]) for group in groups)
    blueprint = Blueprint(
        plain_class,
        {key: _unlike(value, num_params) for key, value in attributes.items()},
        [
            {key: _unlike(v, len(group["params"])) for key, v in tiny_group(group).items()}
            for group, _ in chosen
        ],
    )
    for index, (_, params) in enumerate(chosen):
        large = _LARGE if index == 0 else None
        for rank, source, name in params:
            shapes = [_EVEN[rank], _EVEN[rank], _ODD[rank]]
            if is_frozen(source):
                shapes = shapes[:1]
            elif rank == 2 and large is not None:
                shapes.append(large)
                large = None
            flipped = rank > 1 and not local(source).is_contiguous()
            for copy, shape in enumerate(shapes):
                sample = Sample(
                    index=len(blueprint.samples),
                    group=index,
                    copy=copy,
                    is_odd=copy == 2,
                    is_large=copy == 3,
                    source=source,
                    name=name,
                    shape=shape[::-1] if flipped else shape,
                    reversed_strides=flipped,
                )
                blueprint.samples.append(sample)
    return blueprint


def stretched(blueprint: Blueprint, dim: int) -> Blueprint:
    """Return a blueprint with one parameter of each kind, all long in one dimension."""
    samples: list[Sample] = []
    for sample in blueprint.samples:
        if sample.copy == 0:
            shape = [2] * len(sample.shape)
            if shape:
                shape[0] = shape[-1] = _SHORT
                shape[dim] = _LONG
            samples.append(replace(sample, index=len(samples), shape=tuple(shape)))
    return replace(blueprint, samples=samples)


_Kinds = dict[Any, tuple[int, torch.Tensor, "str | None"]]


def _representatives(
    groups: Sequence[Mapping[str, Any]],
) -> list[tuple[Mapping[str, Any], list[tuple[int, torch.Tensor, str | None]]]]:
    """Choose few groups in which every setting and every kind of parameter occurs."""
    groups = [group for group in groups if group["params"]]
    choices: dict[str, set[Any]] = {}
    for group in groups:
        for key, value in group.items():
            if isinstance(value, (str, int)):
                choices.setdefault(key, set()).add(value)
    switches = {key for key, values in choices.items() if len(values) <= _MAX_CHOICES}

    signatures: list[tuple[Any, ...]] = []
    kinds: dict[tuple[Any, ...], _Kinds] = {}
    for group in groups:
        signature = tuple(
            (key, setting_kind(value, key in switches))
            for key, value in group.items()
            if key not in ("params", "param_names")
        )
        signatures.append(signature)
        names = group.get("param_names", [None] * len(group["params"]))
        for param, name in zip(group["params"], names, strict=True):
            rank = min(param.dim(), 5)
            marks = frozenset(
                (key, value if isinstance(value, bool) else None)
                for key, value in param.__dict__.items()
            )
            kind = (rank, param.dtype, type(param), local(param).is_contiguous(), marks)
            kinds.setdefault(signature, {}).setdefault(kind, (rank, param, name))

    covered: set[Any] = set()
    chosen = []
    for group, signature in zip(groups, signatures, strict=True):
        has = {*signature, *kinds[signature]}
        if not has <= covered:
            covered |= has
            chosen.append((group, list(kinds[signature].values())))
    return chosen


def is_frozen(param: torch.Tensor) -> bool:
    """Whether a parameter never gets a gradient, for its dtype."""
    kind = param.dtype
    has_kernels = kind.is_complex or (kind.is_floating_point and kind.itemsize > 1)
    return not (has_kernels or param.requires_grad)


def setting_kind(value: Any, is_switch: bool) -> Any:
    """What a setting may decide: its value if it is a switch, else whether it is zero."""
    if value is None or isinstance(value, bool) or (is_switch and isinstance(value, (str, int))):
        return value
    if isinstance(value, (int, float)):
        return "number", (value > 0) - (value < 0)
    if isinstance(value, (list, tuple)):
        return tuple(setting_kind(item, False) for item in value)
    if isinstance(value, Mapping):
        return tuple((str(key), setting_kind(item, False)) for key, item in value.items())
    return type(value)


def _unlike(value: Any, num_params: int) -> Any:
    """Make entries of a list unlike that could be one for each parameter, by position.

    Where all are unlike already, it may as well be of something else that is as long.
    """
    if type(value) not in (list, tuple) or len(value) != num_params:
        return value
    names = [repr(item) for item in value]
    if len(set(names)) == len(names):
        return value
    items = list(value)
    if len(items) > _MAX_CHOICES:  # there are fewer tiny parameters, and so each sees another one
        counts: dict[str, int] = {}
        turns = [counts.update({name: counts.get(name, 0) + 1}) or counts[name] for name in names]
        items = [value[index] for index in sorted(range(len(turns)), key=turns.__getitem__)]
    return type(value)(_shrunk(item, 1 / (1 + index / 64)) for index, item in enumerate(items))


def turned(
    groups: Sequence[Mapping[str, Any]], defaults: Mapping[str, Any], turns: int
) -> list[dict[str, Any]]:
    """Return hyper-parameters as they may become later, in the way of a blueprint's ``turns``."""
    if turns < 2:
        rates = [_rate(group, defaults) for group in groups if _has_rate(group)]
        return [{"lr": max(rates)} if turns and _has_rate(group) else {} for group in groups]
    return [
        {
            key: _rate(group, defaults) * (1 + index / 4)
            if key == "lr" and _has_rate(group)
            else _shrunk(value, 1 - index / 128)
            for key, value in group.items()
            if key not in ("params", "param_names", "initial_lr")
        }
        for index, group in enumerate(groups)
    ]


def _has_rate(group: Mapping[str, Any]) -> bool:
    return isinstance(group.get("lr"), (int, float, torch.Tensor))


def _rate(group: Mapping[str, Any], defaults: Mapping[str, Any]) -> float:
    """A learning rate that is not zero, as behind a warm-up."""
    for value in (group.get("initial_lr"), group["lr"], defaults.get("lr")):
        if isinstance(value, (int, float, torch.Tensor)) and float(value) > 0:
            return float(value)
    return 1e-2


def _shrunk(value: Any, factor: float) -> Any:
    if isinstance(value, float):
        return value * factor
    if type(value) in (tuple, list):
        return type(value)(_shrunk(item, factor) for item in value)
    return value


def scale(step: int, dtypes: Iterable[torch.dtype]) -> float:
    """How large the gradients of a step are. Some classes clip those above a threshold."""
    large = 1e2 if torch.float16 in set(dtypes) else 1e3
    return {3: 1e-3, 7: large, 9: 1e-3, 11: large}.get(step, 1.0)
