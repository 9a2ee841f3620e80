"""What the user is told: one line when offload becomes active, a warning at exit if it never did.

Both go to stderr as they are: under ``accelerate launch`` no logger of ours would be shown, and
an offload that was asked for and silently did not happen is the failure that costs most.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import sys
from typing import TYPE_CHECKING

from . import environment

if TYPE_CHECKING:
    from torch_offload import OffloadConfig

_num_converted = 0
_armed = False
_is_launcher = False


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


def _at_exit() -> None:
    if _num_converted or not _trains() or not _requested():
        return
    _say(
        f"WARNING: {environment.SWITCH} asked for optimizer offload, but no optimizer was "
        "offloaded: the state stayed where it was. Only optimizers that are given to "
        "Accelerator.prepare() after that variable was set are offloaded (Trainer does it by "
        "itself), and none was: the script may only evaluate, may step a plain torch optimizer, "
        "may have prepared it earlier, or DeepSpeed or Megatron-LM may own it."
    )


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
    if multiprocessing.parent_process() is None:
        return True
    # A spawned DataLoader worker has imported the script but trains nothing.
    state = sys.modules.get("accelerate.state")
    return state is not None and bool(state.is_initialized())


def _say(text: str) -> None:
    print(f"accelerate_offload: {text}", file=sys.stderr, flush=True)
