"""Train the demo's decoder with Lightning. Offload is one word: `--strategy offload_optimizer`."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, RichProgressBar
from torch import Tensor
from torch.utils.data import DataLoader

from decoder import SIZES, Decoder, Size
from report import Meter, argument_parser, make_repeatable
from text import StdlibBytes

# The batches come out of memory, so a worker process would only cost.
warnings.filterwarnings("ignore", message=".*does not have many workers.*")
# Lightning 2.6 asks torch 2.13 an old question.
warnings.filterwarnings("ignore", message=".*LeafSpec.*is deprecated")
logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)


class LitDecoder(L.LightningModule):
    """The decoder, its loss and its optimizer, as Lightning wants them."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.size = size
        self.model = Decoder(size)

    def training_step(self, batch: Tensor, batch_index: int) -> Tensor:
        """Return the loss of one batch."""
        loss: Tensor = self.model(batch)
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return plain AdamW: the strategy decides where its state lives."""
        return torch.optim.AdamW(self.parameters(), lr=self.size.lr, fused=True)


class Report(Callback):
    """Hands each step's loss to the meter, and writes the report while the state is in place."""

    def __init__(self, path: Any) -> None:
        self.meter, self.path = Meter(), path

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        """Note the step."""
        self.meter.step(outputs["loss"])

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Write the report; Lightning moves the state to the CPU after this."""
        self.meter.write(self.path, module, trainer.optimizers[0])


def main() -> None:
    """Train."""
    parser = argument_parser(__doc__)
    parser.add_argument("--strategy", default="auto")
    args = parser.parse_args()
    size = SIZES[args.size]
    make_repeatable()
    trainer = L.Trainer(
        strategy=args.strategy,
        devices=1,
        max_epochs=1,
        precision="bf16-mixed" if size.bf16 else "32-true",
        callbacks=[RichProgressBar(), Report(args.report)],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    with trainer.init_module():
        module = LitDecoder(size)
    data = StdlibBytes(context=size.context, num_samples=size.steps * size.batch)
    trainer.fit(module, DataLoader(data, batch_size=size.batch))


if __name__ == "__main__":
    main()
