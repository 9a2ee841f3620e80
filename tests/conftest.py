"""Where GPU tests are skipped, and when they must not be."""

from __future__ import annotations

import os

import pytest
import torch

REQUIRE_GPU = os.environ.get("REQUIRE_GPU", "") not in ("", "0")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for item in items:
        for marker, needed in (("gpu", 1), ("multigpu", 2)):
            if item.get_closest_marker(marker) and num_gpus < needed and not REQUIRE_GPU:
                item.add_marker(pytest.mark.skip(reason=f"needs {needed} GPU(s), found {num_gpus}"))


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """The CPU, and the GPU where there is one: one body, both code paths."""
    return torch.device(request.param)


@pytest.fixture(autouse=True)
def default_rng():
    """Each test starts from the same random state and leaves the device's settings alone."""
    torch.manual_seed(0)
    yield
    if torch.cuda.is_available():
        torch.cuda.synchronize()
