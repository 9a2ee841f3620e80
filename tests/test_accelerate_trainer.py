"""An unmodified script with Hugging Face's Trainer, plain and offloaded, with resume."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate_cases import (
    SWITCH,
    accelerate_launch,
    assert_same_tree,
    fresh_accelerate,
    run_python,
    switch,
)

import accelerate_offload
from accelerate_offload import OffloadedOptimizer, offload_metrics

transformers = pytest.importorskip("transformers")

SCRIPT = """
import sys
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

on_gpu, out, resume = sys.argv[1] == "cuda", sys.argv[2], (sys.argv[3:] or [None])[0]


class Text(torch.utils.data.Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        ids = torch.randint(64, (16,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


set_seed(0)
model = GPT2LMHeadModel(
    GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2,
               bos_token_id=0, eos_token_id=0, attn_implementation="eager")
)
args = TrainingArguments(
    out, max_steps=6, save_steps=3, per_device_train_batch_size=4, gradient_accumulation_steps=2,
    learning_rate=1e-2, warmup_steps=2, max_grad_norm=0.5, report_to=[], optim="adamw_torch_fused",
    use_cpu=not on_gpu, bf16=on_gpu, full_determinism=on_gpu, disable_tqdm=True, logging_steps=100,
)
trainer = Trainer(model, args, train_dataset=Text())
trainer.train(resume_from_checkpoint=resume)
print("inner optimizer:", type(trainer.optimizer.optimizer).__name__, args.optim.value)
if trainer.is_world_process_zero():
    torch.save([model.state_dict(), trainer.optimizer.state_dict()], out + "/end.pt")
"""


@pytest.fixture(scope="module", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def runs(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """Where each run left its checkpoints, and its end."""
    folder = tmp_path_factory.mktemp("trainer")
    (folder / "train.py").write_text(SCRIPT)
    found: dict[str, Any] = {"folder": folder}
    for name, resume_from in {
        "plain": None,
        "plain-again": None,
        "offloaded": None,
        "offloaded-from-plain": "plain",
        "plain-from-offloaded": "offloaded",
        "offloaded-from-offloaded": "offloaded",
    }.items():
        env = {"CUDA_VISIBLE_DEVICES": "0"}  # with two, Trainer would use DataParallel
        if name.startswith("offloaded"):
            env.update({SWITCH: "true", "ACCELERATE_OFFLOAD_CHUNK_SIZE": "8KiB"})
        resume = [folder / resume_from / "checkpoint-3"] if resume_from else []
        done = run_python("train.py", request.param, name, *resume, cwd=folder, **env)
        inner = "OffloadedAdamW" if SWITCH in env else "AdamW"
        assert f"inner optimizer: {inner} adamw_torch_fused" in done.stdout
        end = folder / name / "end.pt"
        found[name] = torch.load(end, weights_only=True, map_location="cpu")
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "plain-again",  # the control
        "offloaded",
        "offloaded-from-plain",
        "plain-from-offloaded",
        "offloaded-from-offloaded",
    ],
)
def test_same_end(runs: dict[str, Any], name: str):
    assert_same_tree(runs["plain"], runs[name])


@pytest.mark.slow
def test_same_checkpoint(runs: dict[str, Any]):
    folder: Path = runs["folder"]
    plain, other = (folder / name / "checkpoint-3/optimizer.pt" for name in ("plain", "offloaded"))
    assert other.stat().st_size == pytest.approx(plain.stat().st_size, rel=0.01)
    assert_same_tree(torch.load(plain, weights_only=True), torch.load(other, weights_only=True))


@pytest.mark.exhaustive
def test_two_processes_with_resume(tmp_path: Path):
    (tmp_path / "train.py").write_text(SCRIPT)
    offload = ["--offload_optimizer", "--offload_chunk_size", "8KiB"]
    ends = []
    for name, flags, resume in (
        ("plain", [], []),
        ("offloaded", offload, []),
        ("resumed", offload, ["plain/checkpoint-3"]),
        ("back", [], ["offloaded/checkpoint-3"]),
    ):
        command = ["-m", "accelerate.commands.accelerate_cli", "launch", "--multi_gpu", *flags]
        command += ["--num_processes", "2", "--main_process_port", "0", "train.py", "cpu", name]
        done = run_python(*command, *resume, cwd=tmp_path)
        inner = "OffloadedAdamW" if flags else "AdamW"
        assert done.stdout.count(f"inner optimizer: {inner} adamw_torch_fused") == 2
        ends.append(torch.load(tmp_path / name / "end.pt", weights_only=True))
    for end in ends[1:]:
        assert_same_tree(ends[0], end)


# --- TRL and PEFT -------------------------------------------------------------------

LORA = """
import sys
import torch
from peft import LoraConfig
from transformers import GPT2Config, GPT2LMHeadModel, set_seed

set_seed(0)
model = GPT2LMHeadModel(
    GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2,
               bos_token_id=0, eos_token_id=0, attn_implementation="eager")
)
rows = torch.randint(64, (32, 16), generator=torch.Generator().manual_seed(1)).tolist()
lora = LoraConfig(r=8, target_modules=["c_attn"], task_type="CAUSAL_LM", lora_dropout=0.0,
                  fan_in_fan_out=True)
options = dict(output_dir=sys.argv[1], max_steps=4, per_device_train_batch_size=4,
               gradient_accumulation_steps=2, learning_rate=1e-2, report_to=[], use_cpu=True,
               bf16=False, disable_tqdm=True, save_strategy="no", logging_steps=1)
{trainer}
trainer.train()
trained = {{n: p.detach().cpu() for n, p in trainer.model.named_parameters() if p.requires_grad}}
assert trained and all("lora" in name for name in trained)
print("inner optimizer:", type(trainer.optimizer.optimizer).__name__, len(trained))
losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
torch.save([trained, trainer.optimizer.state_dict(), losses], sys.argv[1] + ".pt")
"""
SFT = """
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer
words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(64)}, unk_token="w0"))
words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="w1", eos_token="w2")
table = Dataset.from_list([{"text": " ".join(f"w{i}" for i in row)} for row in rows])
trainer = SFTTrainer(model, SFTConfig(**options, max_length=16), train_dataset=table,
                     processing_class=tokenizer, peft_config=lora)
"""
PEFT = """
from peft import get_peft_model
from transformers import Trainer, TrainingArguments
trainer = Trainer(get_peft_model(model, lora), TrainingArguments(**options),
                  train_dataset=[{"input_ids": torch.tensor(r), "labels": torch.tensor(r)}
                                 for r in rows])
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "trainer",
    [
        pytest.param(PEFT, marks=pytest.mark.exhaustive, id="transformers-peft"),
        pytest.param(SFT, id="trl-sft-peft"),
    ],
)
def test_lora_under_the_flag(tmp_path: Path, trainer: str):
    for name in ["peft"] if trainer is PEFT else ["peft", "trl"]:
        pytest.importorskip(name)
    (tmp_path / "train.py").write_text(LORA.format(trainer=trainer))
    ends = []
    for name, flags in {
        "plain": [],
        "again": [],
        "offloaded": ["--offload_optimizer", "--offload_chunk_size", "8KiB"],
    }.items():
        done = run_python(*accelerate_launch(*flags, "train.py", name), cwd=tmp_path)
        expected = "OffloadedAdamW" if flags else "AdamW"
        assert f"inner optimizer: {expected}" in done.stdout
        ends.append(torch.load(tmp_path / f"{name}.pt", weights_only=True))
    assert len(ends[0][2]) == 4
    assert_same_tree(ends[0], ends[1])  # the control
    assert_same_tree(ends[0], ends[2])


# --- inside of one process ----------------------------------------------------------


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(64, (16,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


def make_trainer(folder: Path, callbacks: list[Any] | None = None, **options: Any) -> Any:
    transformers.set_seed(0)
    config = transformers.GPT2Config(
        vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2, bos_token_id=0,
        eos_token_id=0, attn_implementation="eager",
    )  # fmt: skip
    args = transformers.TrainingArguments(
        str(folder), **{"max_steps": 4, "per_device_train_batch_size": 4, "report_to": [],
        "use_cpu": True, "disable_tqdm": True, "logging_steps": 1, "save_strategy": "no",
        **options},
    )  # fmt: skip
    model = transformers.GPT2LMHeadModel(config)
    return transformers.Trainer(model, args, train_dataset=Rows(), callbacks=callbacks)


@pytest.fixture
def _clean():
    with fresh_accelerate():
        yield


@pytest.mark.usefixtures("_clean")
def test_resume_reads_optimizer_state_on_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """With several processes stock Trainer reads all of it onto each device."""
    seen: list[tuple[str, Any, Any]] = []
    real = torch.load

    def load(f: Any, map_location: Any = None, **kwargs: Any) -> Any:
        if str(f).endswith(".pt"):
            seen.append((Path(f).name, str(map_location), kwargs.get("mmap", False)))
        return real(f, map_location=map_location, **kwargs)

    monkeypatch.setattr(torch, "load", load)
    make_trainer(tmp_path, max_steps=2, save_strategy="steps", save_steps=2).train()
    checkpoint = str(tmp_path / "checkpoint-2")
    ends = []
    for on in (False, True):
        switch(on)
        trainer = make_trainer(tmp_path / "again", max_steps=2)
        trainer.train()
        assert isinstance(trainer.optimizer, OffloadedOptimizer) is on
        seen.clear()
        with monkeypatch.context() as patch:
            arguments = transformers.TrainingArguments
            patch.setattr(arguments, "world_size", 2)
            patch.setattr(arguments, "device", torch.device("meta"))
            if on:
                trainer._load_optimizer_and_scheduler(checkpoint)
                expected = ("optimizer.pt", "cpu", True)
            else:
                with pytest.raises(NotImplementedError, match="meta"):  # it went to the device
                    trainer._load_optimizer_and_scheduler(checkpoint)
                expected = ("optimizer.pt", "meta", False)
        assert expected in seen
        assert ("scheduler.pt", "None", False) in seen or not on
        ends.append(trainer)
    saved = real(f"{checkpoint}/optimizer.pt", weights_only=True)
    assert_same_tree(saved, ends[1].optimizer.state_dict())
    assert sys.modules["transformers.trainer"].torch is torch


class Tracker(transformers.TrainerCallback):
    """Takes what is logged, as those of report_to do: before the user's callbacks."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.seen.append(dict(logs))


@pytest.mark.usefixtures("_clean")
@pytest.mark.parametrize("on", [True, False])
def test_callback_logs_the_figures(tmp_path: Path, on: bool):
    switch(on)
    tracker = Tracker()
    trainer = make_trainer(tmp_path, [tracker, accelerate_offload.OffloadCallback()])
    trainer.train()
    rows = [row for row in tracker.seen if "loss" in row]
    assert len(rows) == 4
    names = {name for row in rows for name in row if name.startswith("offload/")}
    assert ("offload/step_s" in names) is on
    assert ("offload/host_bytes" in names) is on
    history = [row for row in trainer.state.log_history if "loss" in row]
    for row, kept in zip(rows, history, strict=True):
        assert {k: v for k, v in kept.items() if k != "step"} == row
    if on:
        assert rows[-1]["offload/num_chunks"] > 1
        assert rows[-1]["offload/host_bytes"] > 0
    others = [row for row in tracker.seen if "loss" not in row]
    assert not [name for row in others for name in row if name.startswith("offload/")]


@pytest.mark.usefixtures("_clean")
def test_figures_for_a_tracker():
    for on in (False, True):
        switch(on)
        accelerator = Accelerator(cpu=True)
        net = torch.nn.Linear(4, 4)
        net, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters()))
        accelerator.backward(net(torch.ones(2, 4)).sum())
        optimizer.step()
        figures = offload_metrics(optimizer, prefix="o_")
        assert bool(figures) is on
        assert all(isinstance(value, (int, float)) for value in figures.values())
    assert figures["o_num_chunks"] == 1
    assert offload_metrics(None) == {}


@pytest.mark.usefixtures("_clean")
def test_an_optim_that_cannot_be_offloaded_is_refused(tmp_path: Path):
    """The stand-in of transformers for optimizers that step layer by layer in backward."""
    utils = pytest.importorskip("transformers.trainer_pt_utils")
    switch(True)
    trainer = make_trainer(tmp_path)
    inner = {p: torch.optim.AdamW([p]) for p in trainer.model.parameters()}
    trainer.optimizer = utils.LayerWiseDummyOptimizer(optimizer_dict=inner, lr=1e-3)
    with pytest.raises(NotImplementedError, match=f"LayerWiseDummyOptimizer.*{SWITCH}=false"):
        trainer.train()


@pytest.mark.usefixtures("_clean")
@pytest.mark.parametrize("optim", ["adamw_torch", "adafactor", "sgd", "adagrad", "rmsprop"])
def test_optims_of_trainer_have_the_bits_of_plain(tmp_path: Path, optim: str):
    ends = []
    for on in (False, True):
        switch(on)
        trainer = make_trainer(tmp_path, optim=optim, learning_rate=1e-3)
        trainer.train()
        assert isinstance(trainer.optimizer, OffloadedOptimizer) is on
        ends.append([trainer.model.state_dict(), trainer.optimizer.state_dict()])
    assert_same_tree(*ends)
