"""Flags of ``accelerate launch``: they set environment variables for the processes it starts.

``--offload_optimizer`` is the switch; ``--offload_<field>`` is one field of ``OffloadConfig``.
Both take ``-`` for ``_``, as all of Accelerate's flags do.
"""

from __future__ import annotations

import functools
import logging
import os
from typing import Any

from . import config_file, environment, report

GROUP = "Optimizer Offload Arguments"
SWITCH_FLAG = "--offload_optimizer"

# Not the flags' own names: Accelerate copies every key of every section of its configuration file
# over the attribute of that name, and may have flags of these names itself one day.
_SWITCH_DEST = "torch_offload_switch"
_FIELD_DEST = "torch_offload_field_"


def extend(module: Any) -> None:
    """Wrap the launcher's parser, its merge of flags and file, and the launch itself.

    Args:
        module: ``accelerate.commands.launch``.
    """
    if hasattr(module.launch_command_parser, "_is_accelerate_offload"):
        return
    module.options_to_group[SWITCH_FLAG[2:]] = GROUP  # shown by `-h` when the switch is given
    make_parser, validate = module.launch_command_parser, module._validate_launch_command
    launch = module.launch_command

    @functools.wraps(make_parser)
    def launch_command_parser(*args: Any, **kwargs: Any) -> Any:
        parser = make_parser(*args, **kwargs)
        try:
            _add_flags(parser)
        except Exception as error:  # whatever is wrong with us, Accelerate's commands go on working
            logging.getLogger("torch_offload").warning(
                f"accelerate launch has no {SWITCH_FLAG}: {type(error).__name__}: {error}"
            )
        return parser

    @functools.wraps(validate)
    def _validate_launch_command(args: Any) -> Any:
        # The file is read in here. Flags and file are only complete afterwards.
        result = validate(args)
        _export(args, result[1])
        return result

    @functools.wraps(launch)
    def launch_command(args: Any) -> Any:
        before = dict(os.environ)
        try:
            return launch(args)
        finally:  # another launch from the same process starts afresh
            for name in [name for name in os.environ if name.startswith(environment.PREFIX)]:
                del os.environ[name]
            os.environ.update({k: v for k, v in before.items() if k.startswith(environment.PREFIX)})

    launch_command_parser._is_accelerate_offload = True  # type: ignore[attr-defined]
    module.launch_command_parser = launch_command_parser
    module._validate_launch_command = _validate_launch_command
    module.launch_command = launch_command


def _add_flags(parser: Any) -> None:
    from . import flags  # imports torch, which is there by the time a parser is made

    group = parser.add_argument_group(
        GROUP, "Keep optimizer state in host memory and stream it through the GPU at each step."
    )
    if flags.add(
        group,
        SWITCH_FLAG,
        dest=_SWITCH_DEST,
        action="store_true",
        help="Whether to offload optimizer state.",
    ):
        flags.add_fields(group, _FIELD_DEST)


def _export(args: Any, config: Any) -> None:
    """Set the environment from the flags, and from the configuration file where no flag is."""
    file_is_on, in_file = config_file.read(config)
    given = {
        dest[len(_FIELD_DEST) :]: value
        for dest, value in vars(args).items()
        if dest.startswith(_FIELD_DEST) and value is not None
    }
    on = getattr(args, _SWITCH_DEST, False) or file_is_on
    if environment.refused():
        if on:
            report.switched_off(SWITCH_FLAG if not file_is_on else f"section {config_file.SECTION}")
        return
    if not on and not environment.requested():
        if given:
            raise ValueError(f"--offload_{next(iter(given))} needs {SWITCH_FLAG} as well.")
        return
    if args.use_deepspeed or args.use_megatron_lm:
        raise ValueError(
            "Optimizer offload cannot be combined with DeepSpeed or Megatron-LM: they bring an "
            "optimizer and an offload of their own. Leave out one or the other."
        )
    if config is not None and config.compute_environment.value == "AMAZON_SAGEMAKER":
        raise NotImplementedError(
            f"{SWITCH_FLAG} does not reach SageMaker's machines: Accelerate passes on its own "
            f"variables only. Set {environment.SWITCH}=true in the job's own environment."
        )
    if on:
        given = {**in_file, **given}
    if on or given:
        environment.export(given)
    environment.config_from_environment()  # a wrong variable is reported now, not after loading
