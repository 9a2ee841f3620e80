"""What a training step will need and take, with and without offload. Pure arithmetic: no torch.

A decoder, its layers computed again in backward or not, is trained by an optimizer whose update
runs at the speed of the GPU's memory. Peaks are of memory that torch's allocator hands out: what
it holds in reserve, and the driver's context, come on top.

The model of memory: a peak is at the start of backward (all that forward keeps, no gradients yet),
at its end (all gradients but those of the first layer and the embedding), or in the update
(gradients and slots). The model of time: copies take the state's bytes over the bandwidth in both
directions at once. In step mode nothing hides them, in the others backward or forward does, and
the slots are filled beforehand.
"""

from __future__ import annotations

from dataclasses import dataclass

from .subject import Subject

#: Memory that a layer's backward takes beside what its forward keeps for it, as a factor of that.
#: Fitted to plain AdamW at 8,192 tokens of bench_train-nvidia-h200-20261130T095200.
WORKING = 1.40
#: cuBLAS on two streams.
WORKSPACE_BYTES = 2 * 32 * 2**20
#: Chunks whose gradients live at once in backward mode: two are held, one is waited for.
LIVE_CHUNKS = 3
#: Bytes per token of logits: bf16, fp32, and the gradient.
_LOGIT_BYTES = 10
MODES = ("step", "backward", "forward")


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One step on one GPU, in bytes.

    Attributes:
        params_bytes, grads_bytes, state_bytes: of what this GPU holds.
        layer_grads_bytes: gradients of one layer.
        first_grads_bytes: gradients that come last: the embedding's.
        cast_bytes: copies of one layer's parameters in the type that is computed with.
        kept_bytes: activations that live when forward ends.
        working_bytes: what one layer's backward takes at most.
        loss_bytes: what the loss takes, before the layers' backward begins.
        extra_bytes: buckets of DDP, or layers that FSDP has gathered.
        accumulation: micro-batches of a step; the others are of one of them.
        num_gpus: of this host.
        is_sharded: whether each GPU has a part of the model.
    """

    params_bytes: int
    grads_bytes: int
    state_bytes: int
    layer_grads_bytes: int
    first_grads_bytes: int
    cast_bytes: int
    kept_bytes: int
    working_bytes: int
    loss_bytes: int
    extra_bytes: int = 0
    accumulation: int = 1
    num_gpus: int = 1
    is_sharded: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Seconds of one step's parts without offload, and the link.

    Attributes:
        forward_s, backward_s: of all micro-batches.
        update_s: of resident state.
        clip_s: of clipping by the global norm; 0 without.
        link_bytes_per_s: each way, both at once, for each GPU while all of them copy.
    """

    forward_s: float
    backward_s: float
    update_s: float
    clip_s: float
    link_bytes_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How state is offloaded. `resident_bytes` of it stay on the GPU."""

    overlap: str
    chunk_bytes: int
    num_slots: int
    resident_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Forecast:
    """What one way of training needs and takes.

    Attributes:
        step_s: seconds of a step.
        exposed_s: how many of them offload adds to plain training.
        gpu_bytes: peak of allocated memory in a later step.
        first_gpu_bytes: peak in the first one, in which backward mode only watches.
        host_bytes: pinned memory of all GPUs of the host.
    """

    step_s: float
    exposed_s: float
    gpu_bytes: int
    first_gpu_bytes: int
    host_bytes: int

    @property
    def needed_bytes(self) -> int:
        """Peak over all steps."""
        return max(self.gpu_bytes, self.first_gpu_bytes)


def make_workload(
    subject: Subject,
    *,
    state_bytes: int,
    itemsize: int,
    tokens: int,
    recompute: bool = True,
    loss_tokens: int | None = None,
    accumulation: int = 1,
    num_gpus: int = 1,
    is_sharded: bool = False,
) -> Workload:
    """Return the bytes of a step.

    Args:
        subject: the model.
        state_bytes: of the whole model's state that can travel.
        itemsize: bytes of one parameter's, and one gradient's, element. With 4, computation is in
            bf16 by autocast.
        tokens: of one GPU's step, over all micro-batches.
        recompute: layers keep their input only and are computed again in backward.
        loss_tokens: tokens whose logits live at once; all by default.
        accumulation, num_gpus, is_sharded: as in :class:`Workload`.
    """
    decoder = subject.decoder
    micro = tokens // accumulation
    layer_input = itemsize * decoder.hidden
    # What one layer keeps for its backward: inputs of both norms and of every multiplication,
    # queries, keys, values, what attention gives, and four tensors inside the MLP.
    layer_kept = (18 + 2 * itemsize) * decoder.hidden + 8 * decoder.mlp
    working = round(WORKING * micro * layer_kept)
    parts = num_gpus if is_sharded else 1
    params_bytes = itemsize * (subject.num_params + subject.frozen_params) // parts
    grads_bytes = itemsize * subject.num_params // parts
    layer_bytes = itemsize * subject.layer_params
    if is_sharded:
        extra = 2 * layer_bytes  # one is computed with, the next is gathered
    else:
        extra = grads_bytes if num_gpus > 1 else 0  # DDP's buckets
    return Workload(
        params_bytes=params_bytes,
        grads_bytes=grads_bytes,
        state_bytes=state_bytes // parts,
        layer_grads_bytes=min(layer_bytes // parts, grads_bytes),
        first_grads_bytes=min(itemsize * subject.embedding_params // parts, grads_bytes),
        cast_bytes=2 * subject.layer_params if itemsize == 4 else 0,
        kept_bytes=micro * decoder.layers * (layer_input if recompute else layer_kept),
        working_bytes=working,
        loss_bytes=_LOGIT_BYTES * decoder.vocabulary * min(loss_tokens or micro, micro),
        extra_bytes=extra,
        accumulation=accumulation,
        num_gpus=num_gpus,
        is_sharded=is_sharded,
    )


def operations(subject: Subject, tokens: int, sequence: int, recompute: bool = True) -> float:
    """Return the operations of forward and backward: two for each parameter and token in matrix
    multiplications and causal attention, three times, or four where layers are computed again. What
    is frozen gets no gradient: once less. Each token is taken to use every parameter."""
    decoder = subject.decoder
    total = subject.num_params + subject.frozen_params
    multiplied = 2 * (total - subject.embedding_params)
    frozen = min(2 * subject.frozen_params, multiplied)
    attention = 2 * sequence * decoder.hidden * decoder.layers
    return float(tokens * ((4 if recompute else 3) * (multiplied + attention) - frozen))


def split(compute_s: float, recompute: bool = True) -> tuple[float, float]:
    """Return seconds of forward and of backward, which does twice as much, or three times."""
    forward_s = compute_s / (4 if recompute else 3)
    return forward_s, compute_s - forward_s


def update_seconds(workload: Workload, memory_bytes_per_s: float) -> float:
    """Return seconds of an update: what is trained and state are read and written, gradients, of
    the same size as the former, read."""
    w = workload
    return (3 * w.grads_bytes + 2 * w.state_bytes) / memory_bytes_per_s


def clip_seconds(workload: Workload, memory_bytes_per_s: float) -> float:
    """Return seconds of clipping: gradients are read for their norm, then read and written."""
    return 3 * workload.grads_bytes / memory_bytes_per_s


def plain(workload: Workload, speed: Speed) -> Forecast:
    """Return what training without offload needs and takes."""
    compute_s = speed.forward_s + speed.backward_s
    peak = workload.state_bytes + _backward_peak(workload)
    return Forecast(
        step_s=compute_s + speed.clip_s + speed.update_s,
        exposed_s=0.0,
        gpu_bytes=peak,
        first_gpu_bytes=peak,
        host_bytes=0,
    )


def offloaded(workload: Workload, speed: Speed, settings: Settings) -> Forecast:
    """Return what training with these settings needs and takes."""
    resident = min(settings.resident_bytes, workload.state_bytes)
    traveling = workload.state_bytes - resident
    slots = min(settings.num_slots * settings.chunk_bytes, traveling)
    step_s = _step_seconds(workload, speed, settings, traveling, slots)
    updating = workload.params_bytes + workload.grads_bytes + workload.extra_bytes + slots
    step_peak = resident + max(_backward_peak(workload), updating + WORKSPACE_BYTES)
    peak = step_peak
    if settings.overlap == "forward":
        peak = resident + slots + _backward_peak(workload)
    elif settings.overlap == "backward":
        live = workload.grads_bytes
        if workload.accumulation == 1:
            share = LIVE_CHUNKS * settings.chunk_bytes / max(workload.state_bytes, 1)
            live = min(live, int(share * live))
        peak = resident + slots + _backward_peak(workload, live)
    return Forecast(
        step_s=step_s,
        exposed_s=step_s - plain(workload, speed).step_s,
        gpu_bytes=peak,
        first_gpu_bytes=max(step_peak, peak) if settings.overlap == "backward" else peak,
        host_bytes=traveling * workload.num_gpus,
    )


def _step_seconds(
    workload: Workload, speed: Speed, settings: Settings, traveling: int, slots: int
) -> float:
    link, count = speed.link_bytes_per_s, workload.accumulation
    copies_s = traveling / link
    forward_s, backward_s, update_s = speed.forward_s, speed.backward_s, speed.update_s
    # FSDP gathers what the next forward uses first, and waits for all updates before that.
    waits = settings.overlap == "forward" and workload.is_sharded
    if settings.overlap == "step" or waits:
        return forward_s + backward_s + speed.clip_s + max(update_s, copies_s)
    if settings.overlap == "backward":
        last_s = backward_s / count
        window_s = max(last_s + update_s, (traveling - slots) / link)
        return max(forward_s + backward_s - last_s + window_s, copies_s)
    if settings.overlap == "forward":
        first_s = forward_s / count
        window_s = max(first_s + update_s, copies_s)
        return forward_s - first_s + window_s + backward_s + speed.clip_s
    raise ValueError(f"overlap={settings.overlap!r} is not known. Use one of {', '.join(MODES)}.")


def _backward_peak(workload: Workload, live_grads_bytes: int | None = None) -> int:
    """Return the peak of forward and backward without state. All gradients stay unless given."""
    w = workload
    fixed = w.params_bytes + w.extra_bytes + w.cast_bytes + WORKSPACE_BYTES
    # Earlier micro-batches have left their gradients.
    before = w.grads_bytes if w.accumulation > 1 else 0
    at_start = before + w.kept_bytes + max(w.working_bytes, w.loss_bytes)
    last = w.layer_grads_bytes + w.first_grads_bytes
    at_end = max(w.grads_bytes - last, before, 0) + w.working_bytes
    if live_grads_bytes is not None:
        at_start = max(at_start - before, 0) + live_grads_bytes
        at_end = live_grads_bytes + w.working_bytes
    return fixed + max(at_start, at_end)
