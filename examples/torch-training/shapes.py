"""Trains a small network on drawn pictures: is it a bar, a cross, a box or a disc?

    python shapes.py                       # here; Ctrl-C and again: it goes on
    python shapes.py epochs=2 workers=2
    python shapes.py epochs=1 --check      # cut at every batch, in fresh processes: the same bits?

The parameters are those of ``DEFAULTS``.
"""

from __future__ import annotations

import hashlib
import sys
from typing import Any

try:
    import torch
    from torch import nn
    from torch.utils.data import DataLoader
except ImportError:
    sys.exit("shapes.py needs PyTorch, which is not installed for this Python")

import fiec
import fiec.torch

DEFAULTS: dict[str, Any] = {
    "epochs": 6,
    "pictures": 600,
    "batch": 32,
    "rate": 0.05,
    "workers": 0,  # processes that draw ahead
    "threads": 1,  # the bits depend on it
    "seed": 0,
}
SIDE = 16
KINDS = ["bar", "cross", "box", "disc"]


class Shapes:
    """Pictures of 16 × 16; each time one is read it has another place, size and noise."""

    def __init__(self, pictures: int) -> None:
        self.pictures = pictures
        self.y, self.x = torch.meshgrid(torch.arange(SIDE), torch.arange(SIDE), indexing="ij")

    def __len__(self) -> int:
        return self.pictures

    def __getitem__(self, row: int) -> tuple[Any, int]:
        # From torch's own generator: the loader seeds it for each batch.
        kind = row % len(KINDS)
        across, down = (int(v) for v in torch.randint(5, 11, (2,)))
        size = int(torch.randint(3, 6, ()))
        dx, dy = (self.x - across).abs(), (self.y - down).abs()
        shape = [
            (dx <= 1) & (dy <= size),
            ((dx <= 1) & (dy <= size)) | ((dy <= 1) & (dx <= size)),
            (torch.maximum(dx, dy) <= size) & (torch.maximum(dx, dy) >= size - 1),
            dx**2 + dy**2 <= size**2,
        ][kind]
        return shape.float()[None] + 0.2 * torch.randn(1, SIDE, SIDE), kind


def network() -> Any:
    """Two convolutions with normalization, and the odds of each kind."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(16 * 16, len(KINDS)),
    )


def main(run: fiec.Run) -> dict[str, object]:
    p = DEFAULTS | run.params
    fiec.torch.deterministic(p["threads"])
    rng = fiec.GlobalRandom(p["seed"])  # before the model: it draws the first weights
    device = fiec.torch.device(run)
    model = network().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=p["rate"], momentum=0.9, nesterov=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, p["epochs"])
    scaler = torch.amp.GradScaler(device.type, init_scale=1024.0, growth_interval=20)
    data: Any = Shapes(p["pictures"])
    plain: Any = DataLoader(data, batch_size=p["batch"], shuffle=True, num_workers=p["workers"])
    loader = fiec.torch.Loader(plain, seed=p["seed"])
    # All that a later batch needs.
    state = fiec.torch.state(
        run,
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        scaler=scaler,
        loader=loader,
        rng=rng,
        losses=[],
        hits=0,
        curve=[],
    )
    run.progress(of=p["epochs"] * len(loader))

    for epoch in range(loader.epoch, p["epochs"]):
        for pictures, kinds in run.each(loader):
            optimizer.zero_grad()
            odds = model(pictures.to(device))
            loss: Any = nn.functional.cross_entropy(odds, kinds.to(device))
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            state.losses.append(loss.item())
            state.hits += int((odds.argmax(dim=1).cpu() == kinds).sum())
            run.progress(f"epoch {epoch + 1}", loss=loss.item(), lr=optimizer.param_groups[0]["lr"])
        # Behind the last batch: part of the capsule that follows.
        scheduler.step()
        state.curve.append(state.hits / p["pictures"])
        state.hits = 0

    weights = torch.cat([w.detach().cpu().reshape(-1) for w in model.parameters()])
    run.output("weights.npy", weights.numpy())
    return {
        "first_loss": state.losses[0],
        "loss": sum(state.losses[-10:]) / len(state.losses[-10:]),
        "accuracy": state.curve,
        "weights_sha256": hashlib.sha256(weights.numpy().tobytes()).hexdigest(),
    }


if __name__ == "__main__":
    fiec.main(main)
