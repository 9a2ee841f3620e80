"""A script with transformers' Trainer, as anybody would write it; bench_trainer.py runs it.

It knows nothing of offload. It trains a randomly initialised Llama on random tokens and writes what
it measured, with the loss of every step and a hash of the weights, to a JSON file.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

#: Hidden size, layers, heads, inner size, vocabulary.
SIZES = {
    "tiny": (64, 2, 4, 128, 256),
    "1b": (2048, 14, 16, 8192, 32_000),
}


class Tokens(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Random tokens, the same for the same index."""

    def __init__(self, num_rows: int, length: int, vocabulary: int) -> None:
        self.num_rows, self.length, self.vocabulary = num_rows, length, vocabulary

    def __len__(self) -> int:
        return self.num_rows

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        ids = torch.randint(self.vocabulary, (self.length,), generator=generator)
        return {"input_ids": ids, "labels": ids}


class Watch(TrainerCallback):
    """Takes the time from after the warm-up to the end, and the most memory in each phase."""

    def __init__(self, on_gpu: bool, first_timed: int) -> None:
        self.on_gpu, self.first_timed = on_gpu, first_timed
        self.peaks: dict[str, int] = {}
        self.began = self.block_s = 0.0

    def _mark(self, phase: str) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()
            self.peaks[phase] = torch.cuda.max_memory_allocated()
            torch.cuda.reset_peak_memory_stats()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """All that comes before the first step is done: a checkpoint has been loaded, too."""
        self._mark("setup")

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The warm-up is over."""
        if state.global_step == self.first_timed:
            self._mark("warm_up")
            self.began = time.perf_counter()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The last update has ended."""
        if self.on_gpu:
            torch.cuda.synchronize()
        self.block_s = time.perf_counter() - self.began
        self._mark("steady")


def main() -> None:
    """Train, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", required=True, help="folder of checkpoints")
    parser.add_argument("--result", required=True, help="JSON file to write")
    parser.add_argument("--size", choices=SIZES, default="1b")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--first_timed", type=int, default=6, help="steps of warm-up")
    parser.add_argument("--save_at", type=int, default=0, help="step to save after; 0: none")
    parser.add_argument("--resume", default=None, help="checkpoint to go on from")
    given = parser.parse_args()

    on_gpu = torch.cuda.is_available()
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    transformers.set_seed(0)
    hidden, layers, heads, inner, vocabulary = SIZES[given.size]
    config = LlamaConfig(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        intermediate_size=inner,
        vocab_size=vocabulary,
        max_position_embeddings=given.length,
        use_cache=False,
    )
    with torch.device("cuda" if on_gpu else "cpu"):
        model = LlamaForCausalLM(config)
    losses: list[Tensor] = []
    model.register_forward_hook(lambda _, args, output: losses.append(output.loss.detach()))
    args = TrainingArguments(
        given.out,
        max_steps=given.steps,
        per_device_train_batch_size=given.batch,
        learning_rate=3e-4,
        warmup_steps=2,
        weight_decay=0.1,
        max_grad_norm=1.0,
        optim="adamw_torch_fused",
        bf16=on_gpu,
        use_cpu=not on_gpu,
        seed=0,
        save_strategy="steps" if given.save_at else "no",
        save_steps=given.save_at or 500,
        save_total_limit=1,
        logging_steps=given.steps,
        report_to=[],
        disable_tqdm=True,
    )
    rows = Tokens(given.batch * given.steps, given.length, vocabulary)
    watch = Watch(on_gpu, given.first_timed)
    trainer = Trainer(model, args, train_dataset=rows, callbacks=[watch])
    if given.save_at:
        # One checkpoint, not each multiple of its step.
        trainer.add_callback(SaveOnce(given.save_at))
    trainer.train(resume_from_checkpoint=given.resume)
    digest = hashlib.sha256()
    for param in model.parameters():
        digest.update(param.detach().cpu().contiguous().numpy().tobytes())
    num_timed = given.steps - given.first_timed
    result = {
        "num_params": sum(param.numel() for param in model.parameters()),
        "tokens": given.batch * given.length,
        "block_s": watch.block_s,
        "step_s": watch.block_s / num_timed,
        "tokens_per_s": given.batch * given.length * num_timed / watch.block_s,
        "peak_bytes": watch.peaks,
        "losses": [loss.item() for loss in losses],
        "params_sha256": digest.hexdigest(),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
    }
    with open(given.result, "w") as file:
        json.dump(result, file)


class SaveOnce(TrainerCallback):
    """Saves after one step only."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Do not save at the other steps."""
        control.should_save = state.global_step == self.step


if __name__ == "__main__":
    main()
