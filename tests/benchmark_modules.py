"""The benchmarks' modules as fixtures: they are scripts, and import each other by their names."""

import importlib
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
#: A commit to write into records that are thrown away.
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def module(name):
    """Return a fixture: a module of the benchmarks."""

    @pytest.fixture(name=name)
    def imported(monkeypatch):
        monkeypatch.syspath_prepend(str(BENCHMARKS))
        return importlib.import_module(name)

    return imported
