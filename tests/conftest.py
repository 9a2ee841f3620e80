"""Where GPU tests are skipped, and when they must not be; the record of what the tests find out."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import outcomes
import pytest
import torch

REQUIRE_GPU = os.environ.get("REQUIRE_GPU", "") not in ("", "0")
_FOUND = pytest.StashKey[list[outcomes.Outcome]]()


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


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--write-outcomes",
        action="store_true",
        help="put what the tests find out about each optimizer into docs/optimizers.jsonl",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_FOUND] = []


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    config = session.config
    found = config.stash[_FOUND]
    if exitstatus == 0 and found and config.getoption("--write-outcomes"):
        complete = not config.option.keyword and not any("::" in arg for arg in config.args)
        outcomes.save(outcomes.merge(outcomes.load(), found, complete=complete))


@pytest.fixture(scope="session")
def outcomes_on_record() -> list[outcomes.Outcome]:
    return outcomes.load()


@pytest.fixture
def record_outcome(
    request: pytest.FixtureRequest, outcomes_on_record: list[outcomes.Outcome]
) -> Callable[..., None]:
    """Record what came of one optimizer, flavour and dtype; the device is that of the test.

    Call it as ``record_outcome(optimizer=, flavour=, dtype=, outcome=, reason="", package=)`` with
    one of the outcomes of ``outcomes.py``. Without ``--write-outcomes`` the committed record must
    say the same.
    """
    uses_device = "device" in request.fixturenames
    device: torch.device = request.getfixturevalue("device") if uses_device else torch.device("cpu")

    def record(
        *,
        optimizer: str,
        flavour: str,
        dtype: torch.dtype,
        outcome: str,
        reason: str = "",
        package: str = "torch.optim",
    ) -> None:
        assert outcome in outcomes.ALL
        assert bool(reason) == (outcome != outcomes.EQUAL), "everything but equal has a reason"
        row = outcomes.Outcome(
            device="cpu" if device.type == "cpu" else torch.cuda.get_device_name(device),
            torch=torch.__version__.partition("+")[0],
            package=package,
            optimizer=optimizer,
            flavour=flavour,
            dtype=str(dtype).removeprefix("torch."),
            outcome=outcome,
            reason=" ".join(reason.split()),
            test=f"tests/{Path(request.path).name}::{request.function.__name__}",
        )
        request.config.stash[_FOUND].append(row)
        if not request.config.getoption("--write-outcomes"):
            problem = outcomes.disagreement(row, outcomes_on_record)
            assert problem is None, problem

    return record
