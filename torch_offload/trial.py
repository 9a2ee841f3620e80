"""Makes tiny CPU copies of an optimizer and steps them: as the plain class does, or offloaded.

The offloaded ones go through the core itself, one or a few parameters in a chunk, so whatever a
real step does differently from a plain one is seen.
"""

from __future__ import annotations

import copy
import ctypes
import inspect
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from .blueprint import Blueprint, Sample, scale, turned
from .chunk import TensorSpec
from .config import OffloadConfig
from .conversion import convert
from .counters import Counters, Roots
from .host import Block
from .layout import Layout
from .moments import Moment
from .notices import Notices
from .pipeline import Pipeline
from .probe import simple_attributes
from .random_state import random_state_kept
from .residency import Budget
from .standin import bare, default_device_cpu, like, spare_stand_ins, uncompiled
from .traits import Traits
from .values import rebuilt

NUM_STEPS = 12
#: From this step on, hyper-parameters are others.
_TURN = 5
#: In this step no parameter has a gradient.
_EMPTY = 8
#: Before this step, counters are moved far ahead.
AGE = 9
SEED = 20


class Tiny:
    """A tiny copy of an optimizer.

    Args:
        blueprint: what it is made of.
        in_pieces: make several parameters of each sample, cut along one dimension.
        backwards: list the parameters of a group from last to first.

    Attributes:
        params: the parameters of each sample, in the blueprint's order.
        optimizer: of the user's own class.
    """

    def __init__(
        self, blueprint: Blueprint, in_pieces: bool = False, backwards: bool = False
    ) -> None:
        self.blueprint = blueprint
        self._in_pieces = in_pieces
        self._counters = Counters()
        self.params: list[list[torch.Tensor]] = []
        memo: dict[int, tuple[Any, Any]] = {}
        groups = [{**rebuilt(group, _copied, memo), "params": []} for group in blueprint.groups]
        for sample in blueprint.samples:
            pieces = sample.split(sample.values(seed=SEED), in_pieces)
            made = [like(sample.source, piece.clone()) for piece in pieces]
            for param in made:
                # The source may be frozen for now.
                param.requires_grad_(not sample.is_frozen)
                param.__dict__.update(simple_attributes(sample.source))
            self.params.append(made)
            groups[sample.group]["params"] += made
            if sample.name is not None:
                groups[sample.group].setdefault("param_names", []).extend([sample.name] * len(made))
        if backwards:
            for group in groups:
                group["params"].reverse()
                group.get("param_names", []).reverse()
        state: defaultdict[Any, Any] = defaultdict(dict)
        if blueprint.constructed:
            state.update(_constructed_state(blueprint, groups))
        attributes = rebuilt(dict(blueprint.attributes), _copied, memo)
        attributes.update({name: OrderedDict() for name in _HOOKS})
        self.optimizer: Any = bare(blueprint.plain_class, attributes, groups, state)

    @property
    def flat(self) -> list[torch.Tensor]:
        """All parameters, pieces one by one."""
        return [param for params in self.params for param in params]

    def give_gradients(self, step: int) -> None:
        """Put gradients on the parameters, and turn the hyper-parameters when it is time; and move
        counters on."""
        blueprint = self.blueprint
        self._counters.look(self._numbered())
        if step == AGE:
            self.age()
        size = scale(step, (sample.source.dtype for sample in blueprint.samples))
        for sample, params in zip(blueprint.samples, self.params, strict=True):
            if sample.is_frozen:
                continue
            grad = sample.values(seed=step) * size
            pieces = sample.split(grad, self._in_pieces)
            for param, piece in zip(params, pieces, strict=True):
                param.grad = None
                if not blueprint.gaps or _has_gradient(sample, step, blueprint.gaps):
                    piece = piece.clone()
                    param.grad = piece.to_sparse(1) if blueprint.sparse else piece
        if step == _TURN and blueprint.turns:
            self.turn()
            self._counters.look(self._numbered(), is_step=False)

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Step as the plain class does."""
        with torch.enable_grad():
            return self.blueprint.plain_class.step(self.optimizer, *args, **kwargs)

    def moment(self) -> Moment:
        """Copy everything."""
        memo: dict[int, tuple[Any, Any]] = {}
        state = self.optimizer.__dict__["state"]
        return Moment(
            values=[param.detach().clone() for param in self.flat],
            grads=[None if p.grad is None else p.grad.detach().clone() for p in self.flat],
            marks=[
                {**rebuilt(p.__dict__, _copied, memo), "requires_grad": p.requires_grad}
                for p in self.flat
            ],
            states=[rebuilt(state.get(param, {}), _copied, memo) for param in self.flat],
            groups=[
                {k: rebuilt(v, _copied, memo) for k, v in group.items() if k not in _LISTS}
                for group in self.optimizer.param_groups
            ],
            attributes=rebuilt(self.attributes, _copied, memo),
        )

    def age(self) -> None:
        """Make what counts steps look as after many more of them."""
        if self.blueprint.ages:
            self._counters.advance(self._numbered())

    def _numbered(self) -> Roots:
        """Everything in which steps may be counted."""
        optimizer, state = self.optimizer, self.optimizer.__dict__["state"]
        found: dict[Any, tuple[Any, Any]] = {
            "attributes": (optimizer.__dict__, list(self.attributes))
        }
        for index, group in enumerate(optimizer.param_groups):
            found["group", index] = group, [key for key in group if key not in _LISTS]
        for index, param in enumerate(self.flat):
            entry = state.get(param)
            if isinstance(entry, dict):
                found["state", index] = entry, list(entry)
        return found

    @property
    def attributes(self) -> dict[str, Any]:
        """The optimizer's attributes but groups, state and hooks."""
        return own_attributes(self.optimizer)

    def kept(self) -> list[tuple[str, Any]]:
        """All attributes and settings, with their names."""
        groups = self.optimizer.param_groups
        settings = [pair for group in groups for pair in group.items() if pair[0] not in _LISTS]
        return [*self.attributes.items(), *settings]

    def members(self) -> list[list[int]]:
        """Which parameters are listed in each group, by id."""
        return [[id(param) for param in group["params"]] for group in self.optimizer.param_groups]

    def turn(self) -> None:
        """Change the hyper-parameters to what they may become later."""
        groups = self.optimizer.param_groups
        turns = turned(groups, self.optimizer.defaults, self.blueprint.turns)
        for group, values in zip(groups, turns, strict=True):
            for key, value in values.items():
                if isinstance(group[key], torch.Tensor) and not isinstance(value, torch.Tensor):
                    group[key].fill_(value)  # as LR schedulers do
                else:
                    group[key] = value


class _Piece:
    """Ordinary memory in place of a mapping."""

    seams = ()

    def __init__(self, num_bytes: int) -> None:
        self.memory = bytearray(num_bytes)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))


class _Silent(Notices):
    """There is nobody to be told that offload does not help here."""

    def _once(self, topic: str, text: str) -> None:
        pass


class _Store:
    """In place of a host store: nothing is mapped, locked or counted for a trial."""

    def allocate(self, sizes: Sequence[int], borders: object = None) -> list[Block]:
        """Return blocks of these sizes."""
        blocks = []
        for size in sizes:
            piece: Any = _Piece(size) if size else None
            data = torch.frombuffer(piece.memory, dtype=torch.uint8) if size else torch.empty(0)
            blocks.append(Block(piece, 0, data))
        return blocks


class _Chunks(Layout):
    """Cuts chunks by the number of parameters: state without bytes would fill none."""

    num_params = 1

    def add(
        self,
        states: Sequence[tuple[torch.Tensor, Sequence[TensorSpec]]],
        budget: Budget | None = None,
    ) -> None:
        for start in range(0, len(states), self.num_params):
            super().add(states[start : start + self.num_params])


class TinyOffloaded(Tiny):
    """A tiny copy that was converted.

    Args:
        blueprint: what it is made of.
        num_params: in a chunk.
        traits: what is known about the class so far.
        backwards: list the parameters of a group from last to first.
    """

    def __init__(
        self, blueprint: Blueprint, num_params: int, traits: Traits, backwards: bool = False
    ) -> None:
        super().__init__(blueprint, backwards=backwards)
        convert(self.optimizer, OffloadConfig(pin_memory=False), traits)
        core = self.optimizer._offload_core
        core.notices = _Silent("")
        store: Any = _Store()
        device = torch.device("cpu")
        core._stores[device] = store
        core.pipelines[device] = Pipeline(device, core.config.num_slots, core.notices)
        core.planner.layout = _Chunks(core.config.chunk_bytes, False, lambda device: store)
        core.planner.layout.num_params = num_params

    def step(self, *args: Any, **kwargs: Any) -> Any:
        """Step chunk by chunk."""
        return self.optimizer.step(*args, **kwargs)


@contextmanager
def apart() -> Iterator[None]:
    """The surroundings of a trial: nothing outside of it changes or is told of it."""
    spare_stand_ins()
    with (
        torch.inference_mode(False),
        default_device_cpu(),
        uncompiled(),
        random_state_kept(seed=SEED),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        yield


def own_attributes(optimizer: Any) -> dict[str, Any]:
    """Return an optimizer's attributes but groups, state, hooks and what is lent for one step."""
    return {
        key: value
        for key, value in optimizer.__dict__.items()
        if key not in _NOT_OWN and not key.endswith(("_pre_hooks", "_post_hooks"))
    }


#: What torch's constructor makes for hooks around checkpoints.
_HOOKS = [
    f"_optimizer_{when}_hooks"
    for when in (
        "state_dict_pre",
        "state_dict_post",
        "load_state_dict_pre",
        "load_state_dict_post",
    )
]
_LISTS = frozenset({"params", "param_names"})
#: What is handled by itself, or is ours, torch's, an LR scheduler's or GradScaler's.
_NOT_OWN = frozenset(
    {
        "param_groups",
        "state",
        "step",
        "_offload_core",
        "_opt_called",
        "_zero_grad_profile_name",
        "grad_scale",
        "found_inf",
    }
)


def _has_gradient(sample: Sample, step: int, gaps: int) -> bool:
    """Some parameters get their first gradient late, some miss one, and a group sits out."""
    if step == _EMPTY and gaps > 1:
        return False
    if sample.is_large:  # of its size, torch's kernels start threads
        return step in (1, 2, 7)
    if sample.copy == 0:
        return sample.group == 0 or step >= 6
    if sample.copy == 1:
        return step >= 2 and step != 5
    return step != 1


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().clone()
    return copy.deepcopy(value)


def _constructed_state(
    blueprint: Blueprint, groups: Sequence[Mapping[str, Any]]
) -> dict[torch.Tensor, dict[str, Any]]:
    """Let the class's constructor make the state of tiny parameters.

    Raises:
        TypeError: its arguments are not known.
    """
    kwargs: dict[str, Any] = {}
    known = {**blueprint.attributes, **blueprint.attributes.get("defaults", {}), **groups[0]}
    for name, parameter in list(inspect.signature(blueprint.plain_class).parameters.items())[1:]:
        if name in known:
            kwargs[name] = rebuilt(known[name], _copied)
        elif parameter.default is parameter.empty and parameter.kind not in (
            parameter.VAR_POSITIONAL,
            parameter.VAR_KEYWORD,
        ):
            raise TypeError(f"the argument {name!r} of its constructor is not known")
    given = [{k: v for k, v in group.items() if k != "param_names"} for group in groups]
    made = blueprint.plain_class(given, **kwargs)
    return dict(made.state)
