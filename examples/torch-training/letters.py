"""Trains a small language model on the words of an invented language, letter by letter.

    python letters.py                     # here; Ctrl-C and again: it goes on
    python letters.py epochs=2 rate=0.02
    python letters.py epochs=1 --check    # cut at every batch, in fresh processes: the same bits?

The parameters are those of ``DEFAULTS``.
"""

from __future__ import annotations

import hashlib
import random
import sys
from typing import Any

try:
    import torch
    from torch import nn
    from torch.optim import swa_utils
    from torch.utils.data import DataLoader
except ImportError:
    sys.exit("letters.py needs PyTorch, which is not installed for this Python")

import fiec
import fiec.torch

DEFAULTS: dict[str, Any] = {
    "epochs": 4,
    "batch": 32,  # pieces of text in a batch
    "letters": 32,  # letters in a piece
    "hidden": 64,  # numbers in the state of the network
    "rate": 0.01,
    "workers": 0,  # processes that read ahead
    "threads": 1,  # the bits depend on it
    "seed": 0,
}
ALPHABET = " .abdegiklmnoprstu"
SYLLABLES = ["ba", "do", "gir", "kel", "lu", "man", "nep", "ro", "sti", "tu", "pa", "mi"]


def text(seed: int, words: int = 3000) -> str:
    """Words of two or three syllables; each syllable prefers a few to follow it."""
    draw = random.Random(seed)
    follows = {s: draw.sample(SYLLABLES, 3) for s in SYLLABLES}
    out = []
    for _ in range(words):
        word = [draw.choice(SYLLABLES)]
        for _ in range(draw.randint(1, 2)):
            word.append(draw.choice(follows[word[-1]]))
        out.append("".join(word) + ("." if draw.random() < 0.1 else ""))
    return " ".join(out)


def pieces(seed: int, letters: int) -> Any:
    """The text as rows of numbers, each one letter longer than a piece."""
    numbers = torch.tensor([ALPHABET.index(letter) for letter in text(seed)])
    return numbers.unfold(0, letters + 1, letters).contiguous()


def network(hidden: int) -> Any:
    """Letter by letter: an embedding, a GRU, and the odds of the next letter."""
    parts: Any = nn.ModuleDict(
        {
            "embed": nn.Embedding(len(ALPHABET), hidden),
            "drop": nn.Dropout(0.1),
            "gru": nn.GRU(hidden, hidden, batch_first=True),
            "odds": nn.Linear(hidden, len(ALPHABET)),
        }
    )
    return parts


def predict(model: Any, rows: Any) -> Any:
    """The odds of each next letter."""
    found, _ = model["gru"](model["drop"](model["embed"](rows)))
    return model["odds"](found)


def loss_of(model: Any, rows: Any) -> Any:
    """Mean cross entropy of the next letter."""
    odds = predict(model, rows[:, :-1])
    return nn.functional.cross_entropy(odds.flatten(0, 1), rows[:, 1:].flatten())


def main(run: fiec.Run) -> dict[str, object]:
    p = DEFAULTS | run.params
    fiec.torch.deterministic(p["threads"])
    rng = fiec.GlobalRandom(p["seed"])  # before the model: it draws the first weights
    device = fiec.torch.device(run)
    model = network(p["hidden"]).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=p["rate"])
    data: Any = pieces(p["seed"], p["letters"])
    plain: Any = DataLoader(data, batch_size=p["batch"], shuffle=True, num_workers=p["workers"])
    loader = fiec.torch.Loader(plain, seed=p["seed"])
    total = p["epochs"] * len(loader)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, p["rate"], total_steps=total + 1)
    averages: Any = swa_utils
    average = averages.AveragedModel(model, multi_avg_fn=averages.get_ema_multi_avg_fn(0.9))
    # All that a later batch needs.
    state = fiec.torch.state(
        run,
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        average=average,
        loader=loader,
        rng=rng,
        losses=[],
    )
    run.progress(of=total)

    for epoch in range(loader.epoch, p["epochs"]):
        for rows in run.each(loader):
            optimizer.zero_grad()
            loss = loss_of(model, rows.to(device))
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            average.update_parameters(model)
            state.losses.append(loss.item())
            run.progress(f"epoch {epoch + 1}", loss=loss.item(), lr=scheduler.get_last_lr()[0])

    average.eval()
    with torch.no_grad():
        averaged = float(loss_of(average.module, data[:200].to(device)))
    weights = torch.cat([w.detach().cpu().reshape(-1) for w in average.module.parameters()])
    run.output("weights.npy", weights.numpy())
    return {
        "first_loss": state.losses[0],
        "loss": sum(state.losses[-10:]) / len(state.losses[-10:]),
        "averaged_loss": averaged,
        "weights_sha256": hashlib.sha256(weights.numpy().tobytes()).hexdigest(),
    }


if __name__ == "__main__":
    fiec.main(main)
