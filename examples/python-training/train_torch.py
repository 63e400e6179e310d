"""The loop of `train.py` with PyTorch: model, optimizer and scheduler travel as they are.

Runs where PyTorch is installed, and says so elsewhere. On a GPU, or with another number of
threads, the bits of a sum may differ; `torch.use_deterministic_algorithms` and a fixed number of
threads keep them the same on equal machines.
"""

from __future__ import annotations

import hashlib
import sys
from typing import Any

try:
    import torch
except ImportError:
    sys.exit("train_torch.py needs PyTorch, which is not installed for this Python; see train.py")

import fiec
from train import ARMS, spirals


def main(run: fiec.Run) -> dict[str, object]:
    p = {"epochs": 40, "batch": 60, "hidden": 32, "rate": 0.01, "seed": 0} | run.params
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)
    # Before the model: it seeds the generator that draws the initial weights.
    rng = fiec.GlobalRandom(p["seed"])
    x, arm = (torch.from_numpy(a) for a in spirals(p["seed"]))
    x = x.float()
    model = torch.nn.Sequential(
        torch.nn.Linear(2, p["hidden"]),
        torch.nn.ReLU(),
        torch.nn.Linear(p["hidden"], p["hidden"]),
        torch.nn.ReLU(),
        torch.nn.Linear(p["hidden"], ARMS),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=p["rate"])
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=200, gamma=0.7)
    batches = fiec.Batches(len(x), p["batch"], epochs=p["epochs"], seed=p["seed"])
    state = run.state(
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        batches=batches,
        rng=rng,
        running=0.0,
        curve=[],
    )
    run.progress(of=len(batches) * p["epochs"])

    for rows in run.each(batches):
        noisy = x[rows] + 0.01 * torch.randn(len(rows), 2)
        optimizer.zero_grad()
        loss: Any = torch.nn.functional.cross_entropy(model(noisy), arm[rows])
        loss.backward()
        optimizer.step()
        scheduler.step()
        state.running += loss.item() * len(rows) / len(x)
        run.progress(loss=loss, lr=scheduler.get_last_lr()[0])
        if batches.position == len(x):
            state.curve.append(state.running)
            state.running = 0.0
            run.progress(f"epoch {batches.epoch + 1}, loss {state.curve[-1]:.4f}")

    with torch.no_grad():
        hits = (model(x).argmax(dim=1) == arm).double().mean()
        flat = torch.cat([w.reshape(-1) for w in model.parameters()]).numpy()
    run.output("weights.npy", flat)
    return {
        "loss": state.curve[-1],
        "first_loss": state.curve[0],
        "accuracy": hits,
        "weights_sha256": hashlib.sha256(flat.tobytes()).hexdigest(),
    }


if __name__ == "__main__":
    fiec.main(main)
