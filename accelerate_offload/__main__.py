"""``python -m accelerate_offload [options] script.py ...``: run a script with offload on.

The way in that changes nothing in the launcher, and the one that also works where torch does not
load entry points (``TORCH_DEVICE_BACKEND_AUTOLOAD=0``)::

    accelerate launch -m accelerate_offload --offload_chunk_size 512MiB train.py --lr 1e-4
    accelerate launch -m accelerate_offload -m package.train --lr 1e-4
"""

from __future__ import annotations

import argparse
import builtins
import importlib.machinery
import importlib.util
import itertools
import os
import runpy
import sys
import types
import zipfile
from typing import Any

from . import environment, report

_EPILOG = """Give these options before the script; what follows the script is the script's own:
  accelerate launch -m accelerate_offload --offload_chunk_size 512MiB train.py --lr 1e-4
  accelerate launch -m accelerate_offload -m package.train --lr 1e-4"""


def main(argv: list[str]) -> None:
    """Run the script that ``argv`` names as if Python itself had been given it.

    Args:
        argv: command line without the program's name.
    """
    parser = argparse.ArgumentParser(
        prog="python -m accelerate_offload",
        usage="%(prog)s [-h] [--offload_<field> VALUE ...] [-m] script ...",
        description="Run a training script with its optimizer state offloaded to host memory.",
        epilog=_EPILOG,
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    own = list(itertools.takewhile(lambda arg: arg.startswith("-"), argv))
    if set(own) - {"-m", "--module"}:
        # Only with options of ours is torch imported before the script, which may want to set
        # variables that torch reads when it is imported.
        from . import flags

        flags.add_fields(parser, twins=True)
    parser.add_argument(
        "-m", "--module", action="store_true", help="The script is a module, as in `python -m`."
    )
    parser.add_argument(
        "--offload_optimizer",
        "--offload-optimizer",
        action="store_true",
        help="Accepted and not needed: this is what the command does.",
    )
    # PARSER takes one word that is no option and then everything as it is, "--" included.
    parser.add_argument(
        "script",
        nargs=argparse.PARSER,
        help="Path of the script (name of the module with -m), then its own arguments.",
    )
    args = vars(parser.parse_args(argv))
    words, is_module = args.pop("script"), args.pop("module")
    args.pop("offload_optimizer")
    if words[0] == "--":
        words = words[1:]
    if not words:
        parser.error("the following arguments are required: script")
    script, *script_args = words
    if is_module:
        if not _module_exists(script):
            parser.error(f"no module named {script!r}")
    elif not os.path.exists(script):
        parser.error(f"there is no script {script!r}")

    if environment.refused():
        report.switched_off("-m accelerate_offload")
    environment.export({field: value for field, value in args.items() if value is not None})
    report.arm()
    sys.argv = [script, *script_args]
    if is_module:
        _run_module(script)
        return
    if not getattr(sys.flags, "safe_path", False):
        # `python -m` has put the working directory there; for a script it is the script's.
        sys.path[0] = os.path.dirname(os.path.realpath(script))
    _run_file(os.path.abspath(script))  # absolute, as __file__ is


def _run_file(path: str) -> None:
    if os.path.isdir(path) or zipfile.is_zipfile(path) or not path.endswith((".py", ".pyw")):
        runpy.run_path(path, run_name="__main__")
        return
    with open(path, "rb") as file:
        code = compile(file.read(), path, "exec")
    loader = importlib.machinery.SourceFileLoader("__main__", path)
    _run_as_main(code, __file__=path, __loader__=loader, __cached__=None)


def _run_module(name: str) -> None:
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = importlib.util.find_spec(f"{name}.__main__")
    code = getattr(spec and spec.loader, "get_code", lambda _: None)(spec and spec.name)
    if spec is None or code is None:
        raise SystemExit(f"accelerate_offload: {name} has no code that could be run as a script.")
    sys.argv[0] = spec.origin or name
    _run_as_main(
        code,
        __file__=spec.origin,
        __loader__=spec.loader,
        __spec__=spec,
        __package__=spec.parent,
        __cached__=spec.cached,
    )


def _run_as_main(code: Any, **attributes: Any) -> None:
    """Run code as the module ``__main__``, which stays: threads and exit handlers look it up."""
    module = types.ModuleType("__main__")
    module.__dict__.update({"__builtins__": builtins, **attributes})
    sys.modules["__main__"] = module
    exec(code, module.__dict__)


def _module_exists(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError as error:
        if error.name is None or not name.startswith(error.name):
            raise  # a parent package exists and imports something that does not
        return False


if __name__ == "__main__":
    main(sys.argv[1:])
