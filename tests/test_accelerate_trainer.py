"""An unmodified script with Hugging Face's Trainer, plain and offloaded, with resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate_cases import SWITCH, assert_same_tree, run_python

pytest.importorskip("transformers")
pytestmark = pytest.mark.slow

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


def test_same_checkpoint(runs: dict[str, Any]):
    folder: Path = runs["folder"]
    plain, other = (folder / name / "checkpoint-3/optimizer.pt" for name in ("plain", "offloaded"))
    assert other.stat().st_size == pytest.approx(plain.stat().st_size, rel=0.01)
    assert_same_tree(torch.load(plain, weights_only=True), torch.load(other, weights_only=True))
