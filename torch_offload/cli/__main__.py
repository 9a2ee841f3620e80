"""``python -m torch_offload.cli``: the command without its entry point."""

from .entry import main

main()
