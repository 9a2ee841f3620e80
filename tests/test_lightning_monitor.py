"""What a user sees: figures in loggers and the progress bar, the summary, and warnings."""

from __future__ import annotations

import csv
import importlib
from pathlib import Path
from typing import Any

import lightning_cases as cases
import pytest
import torch
from lightning_rank_cases import class_of

import lightning_offload.strategy
from lightning_offload.summary import summary
from torch_offload import OffloadConfig, offload, offload_stats

pytestmark = cases.QUIET

FIGURES = {
    f"offload/{name}"
    for name in (
        "step_s",
        "exposed_s",
        "h2d_bytes",
        "d2h_bytes",
        "h2d_gb_per_s",
        "d2h_gb_per_s",
        "host_bytes",
        "early_chunks",
    )
}


@pytest.fixture(params=cases.TRAINERS)
def pl(request: pytest.FixtureRequest) -> Any:
    return importlib.import_module(request.param)


def monitor(pl: Any, **arguments: Any) -> Any:
    name = pl.__name__.split(".")[0]
    module = importlib.import_module(f"lightning_offload.trainer_{name}")
    return module.OffloadMonitor(**arguments)


def logged(pl: Any, folder: Path, *, overlap: str = "auto", **arguments: Any) -> Any:
    """Return the Trainer of six steps, and the rows that its logger wrote."""
    logger = pl.loggers.CSVLogger(folder)
    trainer = cases.fit(
        pl,
        class_of(pl.__name__, "")(chunk_size=cases.CHUNK, overlap=overlap),
        2,
        gradient_clip_val=None,
        logger=logger,
        log_every_n_steps=arguments.pop("log_every_n_steps", 1),
        callbacks=[monitor(pl, **arguments)],
    )
    with (Path(logger.log_dir) / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row.get("offload/step_s")]
    return trainer, rows


@pytest.mark.parametrize("overlap", ["step", "backward", "forward"])
def test_figures_are_those_of_the_step(pl: Any, tmp_path: Path, overlap: str) -> None:
    trainer, rows = logged(pl, tmp_path, overlap=overlap)
    assert len(rows) == 6
    stats = offload_stats(trainer.optimizers[0])
    last = {key: float(value) for key, value in rows[-1].items() if key in FIGURES}
    assert last.keys() == FIGURES
    assert last["offload/h2d_bytes"] == stats.h2d_bytes > 0
    assert last["offload/d2h_bytes"] == stats.d2h_bytes > 0
    assert last["offload/host_bytes"] == stats.host_bytes
    assert last["offload/exposed_s"] == pytest.approx(stats.step_s)
    assert last["offload/step_s"] >= last["offload/exposed_s"] > 0
    per_s = last["offload/h2d_bytes"] / last["offload/step_s"] / 1e9
    assert last["offload/h2d_gb_per_s"] == pytest.approx(per_s)
    assert (last["offload/early_chunks"] == 1.0) == (overlap == "backward")
    assert float(rows[0]["offload/early_chunks"]) == 0.0
    assert "offload/peak_gpu_bytes" not in last


def test_the_progress_bar_shows_seconds(pl: Any, tmp_path: Path) -> None:
    trainer, _ = logged(pl, tmp_path)
    shown = trainer.progress_bar_metrics
    assert {key for key in shown if "offload" in key} == {"offload/step_s", "offload/exposed_s"}
    trainer, _ = logged(pl, tmp_path, prog_bar=False)
    assert not [key for key in trainer.progress_bar_metrics if "offload" in key]


def test_figures_come_when_they_are_asked_for(pl: Any, tmp_path: Path) -> None:
    assert len(logged(pl, tmp_path, every_n_steps=2)[1]) == 3
    assert len(logged(pl, tmp_path, log_every_n_steps=3)[1]) == 2
    with pytest.raises(ValueError, match="every_n_steps=0 is not positive"):
        monitor(pl, every_n_steps=0)


def test_a_monitor_changes_no_numbers_and_does_nothing_without_offload(
    pl: Any, tmp_path: Path
) -> None:
    trainer, _ = logged(pl, tmp_path)
    plain = cases.fit(pl, "auto", 2, gradient_clip_val=None, callbacks=[monitor(pl)])
    cases.assert_same(cases.training_state(plain), cases.training_state(trainer))
    assert not [key for key in plain.callback_metrics if "offload" in key]


@pytest.mark.parametrize(
    ("config", "figures"),
    [
        (OffloadConfig(), "up to 0.75 GiB of slots"),
        (
            OffloadConfig(chunk_size="64MiB", num_slots=2, overlap="backward"),
            "up to 0.12 GiB of slots. In page-locked host memory: optimizer state 0.75 GiB. Saved "
            "on cuda:0: 0.62 GiB",
        ),
        (
            OffloadConfig(chunk_size="64MiB", num_slots=2, gpu_budget="50%", pin_memory=False),
            "In host memory: optimizer state 0.75 GiB, but for gpu_budget='50%'. Saved on cuda:0: "
            "0.25 GiB.",
        ),
        (
            OffloadConfig(chunk_size="64MiB", num_slots=2, gpu_budget="auto"),
            "Saved on cuda:0: at most 0.62 GiB.",
        ),
    ],
    ids=str,
)
def test_the_summary_says_where_memory_is(config: OffloadConfig, figures: str) -> None:
    # On the meta device parameters take no memory, and are counted all the same.
    params = [
        torch.nn.Parameter(torch.empty(1024, 1024, 64, device="meta")),
        torch.nn.Parameter(torch.empty(1024, 1024, 32, device="meta")),
        torch.nn.Parameter(torch.empty(1024, 1024, 32, device="meta"), requires_grad=False),
    ]
    optimizer = offload(torch.optim.AdamW(params), config)
    said = summary(optimizer, "AdamW", torch.device("cuda", 0), config, "so")
    start = f"AdamW, overlap={config.overlap!r} (so). On cuda:0: parameters 0.50 GiB, "
    assert said.startswith(f"{start}gradients 0.38 GiB, up to ")
    assert figures in said


@pytest.mark.parametrize("device", ["cpu", "mps"])
def test_where_the_memory_is_the_hosts_it_is_said_once(device: str) -> None:
    net = cases.make_net()
    optimizer = offload(cases.make_optimizer(net))
    said = summary(optimizer, "AdamW", torch.device(device), OffloadConfig(), "so")
    assert f"on {device}, whose memory is the host's: offload is a pass-through there" in said


def test_a_second_fit_says_nothing_new(pl: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(lightning_offload.strategy, "rank_zero_info", lines.append)
    module = cases.make_module(pl)
    trainer = cases.fit(pl, class_of(pl.__name__, "")(), 1, module=module)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, cases.make_loader())
    assert len(lines) == 1
    # with another mode it does
    trainer.gradient_clip_val = None
    trainer.fit_loop.max_epochs = 3
    trainer.fit(module, cases.make_loader())
    assert [("'forward'" in line, "'backward'" in line) for line in lines] == [
        (True, False),
        (False, True),
    ]


@pytest.mark.parametrize(("version", "warns"), [("2.5.9", 0), ("2.6.0", 0), ("3.1.0", 1)])
def test_a_version_that_was_never_tested_gets_one_warning(
    pl: Any, monkeypatch: pytest.MonkeyPatch, version: str, warns: int
) -> None:
    package = pl.__name__.split(".")[0]
    monkeypatch.setattr(importlib.import_module(package), "__version__", version)
    monkeypatch.setattr(lightning_offload.strategy, "_warned", set())
    said: list[str] = []
    monkeypatch.setattr(lightning_offload.strategy, "rank_zero_warn", said.append)
    for short in ("", "DDP", ""):
        class_of(pl.__name__, short)()
    text = f"offload_optimizer was tested with {package} 2.5 and 2.6, not with {version}."
    assert said == [text] * warns


def test_an_optimizer_that_the_user_converted_keeps_its_config(pl: Any) -> None:
    config = OffloadConfig(chunk_size=12_345, overlap="step")
    module = cases.make_module(
        pl, optimizer=lambda net: [offload(cases.make_optimizer(net), config)]
    )
    trainer = cases.fit(pl, class_of(pl.__name__, "")(chunk_size=cases.CHUNK), 2, module=module)
    assert trainer.optimizers[0]._offload_core.config == config
    plain = cases.make_module(pl, optimizer=lambda net: [cases.make_optimizer(net)])
    expected = cases.fit(pl, "auto", 2, module=plain)
    cases.assert_same(cases.training_state(expected), cases.training_state(trainer))


def test_an_optimizer_that_goes_on_in_another_mode_keeps_its_state_in_place(pl: Any) -> None:
    """The same object in two fits, of which the second one clips."""
    states = []
    for kind in ("plain", "ours"):
        net = cases.make_net()
        optimizer = cases.make_optimizer(net)
        module = cases.make_module(pl, net, optimizer=lambda _, built=optimizer: built)
        strategy = "auto" if kind == "plain" else class_of(pl.__name__, "")(chunk_size=cases.CHUNK)
        trainer = cases.fit(pl, strategy, 2, module=module, gradient_clip_val=None)
        before = [id(state["exp_avg"]) for state in optimizer.state.values()]
        trainer.gradient_clip_val = 0.05
        trainer.fit_loop.max_epochs = 4
        trainer.fit(module, cases.make_loader())
        states.append(cases.training_state(trainer))
    assert [id(state["exp_avg"]) for state in optimizer.state.values()] == before
    assert optimizer._offload_core.config.overlap == "forward"
    cases.assert_same(*states)
