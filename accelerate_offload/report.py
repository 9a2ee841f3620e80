"""What the user is told: one line when offload becomes active, a warning at exit if it never did.

Both go to stderr as they are: under ``accelerate launch`` no logger of ours would be shown, and
an offload that was asked for and silently did not happen is the failure that costs most.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import sys
from typing import TYPE_CHECKING, Any

from . import environment

if TYPE_CHECKING:
    from torch_offload import OffloadConfig

_num_converted = 0
_num_plain = 0
_armed = False
_is_launcher = False
_has_forked = False


def active(optimizer_name: str, config: OffloadConfig | None, *, is_main_process: bool) -> None:
    """Note that an optimizer was converted; print the one line for the first of this process.

    Args:
        optimizer_name: class of the user's optimizer.
        config: how it was converted, or None if user code did that itself.
        is_main_process: whether this process speaks for the run.
    """
    global _num_converted
    _num_converted += 1
    if _num_converted == 1 and is_main_process:
        how = "as configured in code" if config is None else repr(config)
        _say(f"optimizer offload is active: state of {optimizer_name} lives in host memory, {how}")


def plain() -> None:
    """Note that an optimizer was prepared and not converted."""
    global _num_plain
    _num_plain += 1


def switched_off(what: str) -> None:
    """Say that something which asks for offload has no effect.

    Args:
        what: a flag, or a name in the script.
    """
    _say(f"{environment.SWITCH}={os.environ[environment.SWITCH]}: {what} has no effect")


def arm() -> None:
    """Have the end of this process warn if offload was asked for and nothing was converted."""
    global _armed
    if not _armed:
        _armed = True
        atexit.register(_at_exit)


def this_is_a_launcher() -> None:
    """Note that this process only starts others: it has nothing to convert and will not warn."""
    global _is_launcher
    _is_launcher = True


def this_forks() -> None:
    """Note that this process starts others that train; it may train as well."""
    global _has_forked
    _has_forked = True


def _at_exit() -> None:
    if _num_converted or not _trains() or not _requested():
        return
    _say(
        f"WARNING: {environment.SWITCH} asked for optimizer offload, but no optimizer was "
        f"offloaded: the state stayed where it was. {_why()}"
    )


def _why() -> str:
    rule = "Only optimizers that are given to Accelerator.prepare() are offloaded"
    kind = _distributed_type()
    if kind in ("DEEPSPEED", "MEGATRON_LM"):
        return (
            f"{kind} is in charge of the optimizer, and brings an offload of its own: use its "
            f"settings, and unset {environment.SWITCH}."
        )
    if _num_plain:
        return (
            f"{rule}, and this script's was prepared before that variable was set: set it, or "
            "build OffloadOptimizerPlugin, before prepare()."
        )
    if kind is None:
        return (
            f"{rule}, and this script builds no Accelerator: it may only evaluate, or step a plain "
            "torch optimizer. Call torch_offload.offload(optimizer) there."
        )
    return (
        f"{rule} (Trainer does it by itself), and none was: the script may only evaluate, or step "
        "a plain torch optimizer."
    )


def _distributed_type() -> str | None:
    """Return the kind of run, as Accelerate names it; None if there is no Accelerator."""
    state: Any = sys.modules.get("accelerate.state")
    if state is None or not state.is_initialized():
        return None
    return str(state.AcceleratorState._shared_state.get("distributed_type", "")).split(".")[-1]


def _requested() -> bool:
    try:
        return environment.requested()
    except ValueError:  # prepare() is where a wrong value is an error
        return False


def _trains() -> bool:
    """Whether this is the process that speaks for a training run, and it ended by itself."""
    if _is_launcher or getattr(sys, "last_type", None) is not None:
        return False
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    if spec is not None and spec.name.startswith("accelerate.commands."):
        return False  # `python -m accelerate.commands.launch` imports no launcher, it is one
    if os.environ.get("RANK", "0") != "0":
        return False
    if multiprocessing.parent_process() is None and not _has_forked:
        return True
    # A spawned DataLoader worker has imported the script but trains nothing, and neither does a
    # notebook that starts processes.
    return _distributed_type() is not None


def _say(text: str) -> None:
    print(f"accelerate_offload: {text}", file=sys.stderr, flush=True)
