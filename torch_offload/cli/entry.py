"""Where the command starts: it says which extra is missing."""

from __future__ import annotations


def main() -> None:
    """Run the command."""
    try:
        import click as _click
        import rich as _rich
    except ImportError as error:
        raise SystemExit(
            f"torch-offload needs {error.name}, which is not installed. "
            'Run `pip install "torch-offload[cli]"`.'
        ) from None
    del _click, _rich
    from .app import commands

    commands(prog_name="torch-offload")
