"""The `torch-offload` command: what the link gives, what offload would save, and benchmarks.

Nothing in the core imports this package. It needs the extra `cli` (click and rich).
"""
