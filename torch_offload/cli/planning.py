"""From a request to a plan: checks what was asked, puts the inputs together, tries every mode."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from rich.console import RenderableType

from .. import OffloadConfig
from . import hardware
from .advice import (
    Choice,
    Limits,
    accelerate_command,
    best_offload,
    choices,
    lightning_code,
    python_code,
    recommend,
)
from .forecast import (
    Speed,
    Workload,
    clip_seconds,
    make_workload,
    split,
    update_seconds,
)
from .inputs import ASSUMED, GIVEN, Request, compute_of, gpu_of, limits_of, link_of
from .report import plan_report
from .state import DTYPES as _DTYPES
from .state import of_factory, optimizer_class, state_bytes
from .subject import Subject, of_config, of_count

DTYPES = list(_DTYPES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What came of it. `facts` are the inputs with where each is from."""

    request: Request
    workload: Workload
    speed: Speed
    limits: Limits
    candidates: list[Choice] = field(default_factory=list)
    facts: list[tuple[str, str]] = field(default_factory=list)

    @property
    def chosen(self) -> Choice | None:
        """The recommendation."""
        return recommend(self.candidates)

    @property
    def offloading(self) -> Choice | None:
        """The recommendation among those that offload."""
        return best_offload(self.candidates)

    def report(self) -> RenderableType:
        """Return the tables."""
        return plan_report(
            self.candidates,
            self.chosen,
            self.offloading,
            self.facts,
            num_gpus=self.request.num_gpus,
            is_sharded=self.request.sharded,
        )

    def to_json(self) -> str:
        """Return everything as text."""
        chosen, offloading, request = self.chosen, self.offloading, self.request
        written = {}
        if offloading is not None and offloading.settings is not None:
            settings = offloading.settings
            written = {
                "python": python_code(settings),
                "lightning": lightning_code(settings, request.num_gpus, request.sharded),
                "accelerate": accelerate_command(settings, request.num_gpus, request.sharded),
            }
        record = {
            "facts": dict(self.facts),
            "workload": asdict(self.workload),
            "speed": asdict(self.speed),
            "limits": asdict(self.limits),
            "choices": [{"name": c.name, **asdict(c)} for c in self.candidates],
            "recommended": chosen.name if chosen else None,
            "recommended_offload": offloading.name if offloading else None,
            "settings": written,
        }
        return json.dumps(record, indent=1) + "\n"


def make_plan(request: Request, say: Callable[[str], None] = lambda _: None) -> Plan:
    """Return the plan.

    Raises:
        ValueError: an option is wrong, or something is needed that is not given.
    """
    _check(request)
    subject = _subject(request)
    dtype = _DTYPES[request.dtype]
    settings = _settings(request.optimizer_setting)
    size = state_bytes(optimizer_class(request.optimizer), subject.shapes, dtype, settings)
    if not size:
        raise ValueError(
            f"optimizer={request.optimizer!r} keeps no state that could be offloaded"
            + (" with these settings." if settings else ". SGD has some with momentum.")
        )
    workload = make_workload(
        subject,
        state_bytes=size,
        itemsize=dtype.itemsize,
        tokens=request.tokens,
        recompute=request.recompute,
        loss_tokens=request.loss_tokens,
        accumulation=request.accumulation,
        num_gpus=request.num_gpus,
        is_sharded=request.sharded,
    )
    name, own_gpu = gpu_of(request)
    gpu = hardware.find(name)
    link, link_from = link_of(request, gpu, own_gpu, say)
    compute_s, compute_from = compute_of(request, subject, gpu, name)
    if gpu is None:
        raise ValueError(
            f"gpu={name!r} is not known. Use --gpu with the one that is most alike: "
            f"{hardware.known()}."
        )
    rate = hardware.MEMORY_SHARE * gpu.memory_bytes_per_s
    forward_s, backward_s = split(compute_s, request.recompute)
    speed = Speed(
        forward_s=forward_s,
        backward_s=backward_s,
        update_s=update_seconds(workload, rate),
        clip_s=clip_seconds(workload, rate) if request.clip else 0.0,
        link_bytes_per_s=link,
    )
    limits, memory_from, host_from = limits_of(request, gpu, own_gpu)
    config = OffloadConfig(chunk_size=request.chunk_size, num_slots=request.num_slots)
    assumed = f" ({ASSUMED})" if subject.is_assumed else ""
    frozen = f" and {subject.frozen_params:,} frozen" if subject.frozen_params else ""
    gpu_text = "this machine" if own_gpu is not None else GIVEN if request.gpu else ASSUMED
    facts = [
        ("model", f"{subject.origin}{assumed}, {subject.num_params:,} parameters{frozen}"),
        ("state", f"{size / 1e9:.1f} GB of {request.optimizer}, {request.dtype} parameters"),
        ("GPU", f"{request.num_gpus} x {name} ({gpu_text}), {memory_from}"),
        ("host memory", host_from),
        ("link", f"{link / 1e9:.1f} GB/s each way, both at once ({link_from})"),
        ("forward, backward", f"{forward_s:.3f} s, {backward_s:.3f} s ({compute_from})"),
    ]
    candidates = choices(
        workload,
        speed,
        limits,
        chunk_bytes=config.chunk_bytes,
        num_slots=config.num_slots,
        clips=request.clip,
    )
    return Plan(
        request=request,
        workload=workload,
        speed=speed,
        limits=limits,
        candidates=candidates,
        facts=facts,
    )


def _check(request: Request) -> None:
    for name in ("tokens", "sequence", "accumulation", "num_gpus", "loss_tokens", "compute_tokens"):
        value = getattr(request, name)
        if value is not None and value < 1:
            raise ValueError(f"{name}={value} is too small. Use 1 or more.")
    for name in ("bandwidth", "compute_s"):
        value = getattr(request, name)
        if value is not None and not 0 < value < float("inf"):
            raise ValueError(f"{name}={value} is not above zero.")
    if request.tokens % request.accumulation:
        raise ValueError(
            f"tokens={request.tokens} is not a multiple of accumulation={request.accumulation}."
        )
    if request.sharded and request.num_gpus == 1:
        raise ValueError("sharded needs several GPUs. Give --num-gpus, or leave --sharded.")
    if request.bandwidth is not None and request.probe_file is not None:
        raise ValueError("bandwidth and probe say the same thing. Give one of them.")
    if request.compute_tokens is not None and request.compute_s is None:
        raise ValueError("compute_tokens says what --compute-s was measured with. Give that too.")


def _subject(request: Request) -> Subject:
    given = [n for n in ("params", "model", "config") if getattr(request, n) is not None]
    if len(given) != 1:
        raise ValueError(
            f"{' and '.join(given) or 'no model'} given. Give one of --params, --model, --config."
        )
    if request.params is not None:
        return of_count(request.params)
    if request.model is not None:
        return of_factory(request.model)
    assert request.config is not None
    return of_config(request.config)


def _settings(texts: tuple[str, ...]) -> Mapping[str, Any]:
    settings = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise ValueError(f"optimizer_setting={text!r} is not of the form name=value.")
        try:
            settings[name] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            settings[name] = value
    return settings
