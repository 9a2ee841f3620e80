"""Train the demo's decoder with Accelerate. Nothing here mentions offload: the launcher does.

accelerate launch --offload_optimizer examples/train_accelerate.py
"""

from __future__ import annotations

import torch
from accelerate import Accelerator
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch.utils.data import DataLoader

from decoder import SIZES, Decoder
from report import Meter, argument_parser, make_repeatable
from text import StdlibBytes


def main() -> None:
    """Train."""
    args = argument_parser(__doc__).parse_args()
    size = SIZES[args.size]
    make_repeatable()
    accelerator = Accelerator(mixed_precision=size.precision)
    with accelerator.device:
        model = Decoder(size)
    data = StdlibBytes(context=size.context, num_samples=size.steps * size.batch)
    optimizer = torch.optim.AdamW(model.parameters(), lr=size.lr, fused=True)
    model, optimizer, loader = accelerator.prepare(
        model, optimizer, DataLoader(data, batch_size=size.batch)
    )
    meter = Meter()
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("loss {task.fields[loss]:.3f}"),
    )
    with Progress(*columns) as progress:
        task = progress.add_task("train", total=size.steps, loss=float("nan"))
        for batch in loader:
            loss = model(batch)
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            meter.step(loss)
            progress.update(task, advance=1, loss=meter.losses[-1])
    meter.write(args.report, model, optimizer)


if __name__ == "__main__":
    main()
