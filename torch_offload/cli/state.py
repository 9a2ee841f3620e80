"""What is asked of torch and of the user's code: state's bytes, and a model's parameters."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from ..probe import StateProbe
from ..trial import own_attributes
from .subject import Decoder, Shape, Subject, of_count, of_settings

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
#: Where an optimizer has no default for it.
_LEARNING_RATE = 1e-3


def load(target: str, field: str) -> Any:
    """Return what ``module:name`` names.

    Raises:
        ValueError: there is no such thing.
    """
    module, _, name = target.partition(":")
    if not module or not name:
        raise ValueError(f"{field}={target!r} is not of the form module:name.")
    try:
        return getattr(importlib.import_module(module), name)
    except ImportError as error:
        raise ValueError(f"{field}={target!r} cannot be imported: {error}.") from error
    except AttributeError:
        raise ValueError(f"{field}={target!r}: {module} has no {name!r}.") from None


def optimizer_class(name: str) -> type[torch.optim.Optimizer]:
    """Return the class of torch.optim with that name, or the one that ``module:name`` names.

    Raises:
        ValueError: there is none.
    """
    found = load(name, "optimizer") if ":" in name else getattr(torch.optim, name, None)
    if not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
        raise ValueError(
            f"optimizer={name!r} is no optimizer. Use a name of torch.optim, such as AdamW, or "
            "module:name."
        )
    return found


def state_bytes(
    kind: type[torch.optim.Optimizer],
    shapes: Mapping[Shape, int],
    dtype: torch.dtype,
    settings: Mapping[str, Any] | None = None,
) -> int:
    """Return the bytes of state that can travel, for parameters of these shapes.

    Each shape is stepped once on the meta device: nothing is allocated.

    Args:
        kind: any optimizer class.
        shapes: how often each shape occurs.
        dtype: of the parameters.
        settings: arguments of the class besides the parameters.

    Raises:
        ValueError: the class cannot be made so, or its state cannot be told.
    """
    total = 0
    for shape, count in shapes.items():
        param = nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"))
        optimizer = _make(kind, param, dict(settings or {}))
        probe = StateProbe(kind)
        probe.attributes = own_attributes(optimizer)
        try:
            specs = probe.specs(optimizer.param_groups[0], param)
        except NotImplementedError as error:
            raise ValueError(f"optimizer={kind.__name__!r} cannot be offloaded: {error}") from error
        if specs is None:
            raise ValueError(
                f"optimizer={kind.__name__!r}: its state cannot be told before a real step. "
                "Use the optimizer whose state is most alike."
            )
        total += count * sum(spec.num_bytes for spec in specs)
    return total


def of_factory(target: str) -> Subject:
    """Return the model that a function without arguments builds on the meta device.

    Raises:
        ValueError: there is no such function, or it builds no module.
    """
    factory: Callable[[], Any] = load(target, "model")
    if not callable(factory):
        raise ValueError(f"model={target!r} is no function. Give one that returns the module.")
    with torch.device("meta"):
        model = factory()
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"model={target!r} returned a {type(model).__name__}. It must return a torch module."
        )
    return of_module(model, target)


def of_module(model: nn.Module, name: str) -> Subject:
    """Return what a module is: its shapes exactly, the decoder as far as it can be told."""
    shapes = Counter(tuple(p.shape) for p in model.parameters() if p.requires_grad)
    if not shapes:
        raise ValueError(f"model={name!r} has no parameters that are trained.")
    counted = {shape: count for shape, count in shapes.items()}
    decoder, embedding, is_assumed = _decoder_of(model, counted)
    return Subject(
        shapes=counted,
        decoder=decoder,
        embedding_params=embedding,
        origin=name,
        is_assumed=is_assumed,
        frozen_params=sum(p.numel() for p in model.parameters() if not p.requires_grad),
    )


def _decoder_of(model: nn.Module, shapes: Mapping[Shape, int]) -> tuple[Decoder, int, bool]:
    config: Any = getattr(model, "config", None)
    if config is not None and hasattr(config, "to_dict"):
        try:
            subject = of_settings(config.to_dict(), "model.config")
            return subject.decoder, subject.embedding_params, False
        except ValueError:
            pass  # a kind that is not known: looked at below
    embeddings = [m for m in model.modules() if isinstance(m, nn.Embedding)]
    lists = [m for m in model.modules() if isinstance(m, (nn.ModuleList, nn.Sequential)) and len(m)]
    if not embeddings or not lists:
        count = Subject(
            shapes=shapes,
            decoder=Decoder(hidden=1, mlp=1, layers=1, vocabulary=0),
            embedding_params=0,
            origin="",
        ).num_params
        guess = of_count(max(count, 100_000))
        return guess.decoder, min(guess.embedding_params, count // 2), True
    words = max(embeddings, key=lambda m: m.num_embeddings)
    layers = max(lists, key=_weight)
    widths = (m.out_features for m in layers[0].modules() if isinstance(m, nn.Linear))
    hidden = words.embedding_dim
    is_tied = any(
        parameter is words.weight
        for module in model.modules()
        if isinstance(module, nn.Linear)
        for parameter in module.parameters(recurse=False)
    )
    return (
        Decoder(
            hidden=hidden,
            mlp=max((w for w in widths if w != 3 * hidden), default=4 * hidden),
            layers=len(layers),
            vocabulary=words.num_embeddings,
        ),
        0 if is_tied else words.weight.numel(),
        False,
    )


def _weight(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _make(
    kind: type[torch.optim.Optimizer], param: nn.Parameter, settings: dict[str, Any]
) -> torch.optim.Optimizer:
    make: Callable[..., torch.optim.Optimizer] = kind
    try:
        try:
            return make([param], **settings)
        except TypeError:
            if "lr" in settings:
                raise
            return make([param], lr=_LEARNING_RATE, **settings)
    except (TypeError, ValueError) as error:
        given = ", ".join(f"{key}={value!r}" for key, value in settings.items()) or "no settings"
        raise ValueError(
            f"optimizer={kind.__name__!r} cannot be made with {given}: {error}. "
            "Give its settings as --optimizer-setting name=value."
        ) from error
