"""Trains a small network on three interleaved spirals, with numpy alone.

    python train.py                     # here; Ctrl-C and again: it goes on
    python train.py epochs=20 rate=0.02
    python train.py epochs=5 --check    # cut at every batch, in fresh processes: the same bits?

The parameters are those of ``DEFAULTS``.
"""

from __future__ import annotations

import hashlib
import time
from typing import Any

import numpy as np

import fiec

ARMS = 3
Weights = dict[str, Any]
DEFAULTS: dict[str, Any] = {
    "epochs": 60,
    "batch": 60,  # points in a batch
    "hidden": 32,  # neurons in each of two layers
    "rate": 0.05,
    "noise": 0.01,  # standard deviation of what is added to the points
    "keep": 20,  # weights are an output every so many epochs
    "seed": 0,
    "pause_ms": 0,  # makes a batch last longer, so that a move can be watched
}


def spirals(seed: int, points: int = 300) -> tuple[Any, Any]:
    """Points of each arm as rows (x, y), and which arm each belongs to."""
    rng = np.random.default_rng(seed)
    radius = np.tile(np.linspace(0.1, 1.0, points), ARMS)
    arm = np.repeat(np.arange(ARMS), points)
    angle = 4.0 * radius + 2.0 * np.pi * arm / ARMS + rng.normal(0.0, 0.15, radius.size)
    return np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1), arm


def begin(seed: int, hidden: int) -> Weights:
    """Random weights (He) and zero biases of a network 2 → hidden → hidden → arms."""
    rng = np.random.default_rng(seed + 1)
    sizes = [2, hidden, hidden, ARMS]
    weights = {}
    for layer, (n, m) in enumerate(zip(sizes, sizes[1:])):
        weights[f"w{layer}"] = rng.normal(0.0, np.sqrt(2.0 / n), (n, m))
        weights[f"b{layer}"] = np.zeros(m)
    return weights


def forward(w: Weights, x: Any) -> tuple[Any, Any, Any]:
    """Both hidden layers, and the probability of each arm."""
    one = np.maximum(x @ w["w0"] + w["b0"], 0.0)
    two = np.maximum(one @ w["w1"] + w["b1"], 0.0)
    scores = two @ w["w2"] + w["b2"]
    odds = np.exp(scores - scores.max(axis=1, keepdims=True))
    return one, two, odds / odds.sum(axis=1, keepdims=True)


def gradient(w: Weights, x: Any, arm: Any) -> tuple[float, Weights]:
    """Mean cross entropy, and its gradient by each weight."""
    one, two, odds = forward(w, x)
    rows = np.arange(len(x))
    loss = float(-np.log(odds[rows, arm] + 1e-12).mean())
    g: Weights = {}
    back = odds.copy()
    back[rows, arm] -= 1.0
    back /= len(x)
    for layer, below in ((2, two), (1, one), (0, x)):
        g[f"w{layer}"], g[f"b{layer}"] = below.T @ back, back.sum(axis=0)
        if layer:
            back = (back @ w[f"w{layer}"].T) * (below > 0.0)
    return loss, g


def flat(w: Weights) -> Any:
    """All weights in a row."""
    return np.concatenate([part.ravel() for part in w.values()])


def main(run: fiec.Run) -> dict[str, object]:
    p = DEFAULTS | run.params
    if not 0.0 < p["rate"] < 1.0:
        raise fiec.Failed(f"params.rate: must lie between 0 and 1, not {p['rate']}")
    x, arm = spirals(p["seed"])
    weights = begin(p["seed"], p["hidden"])
    # All that a later batch needs: nothing else may survive the turn of the loop.
    state = run.state(
        weights=weights,
        momentum={name: np.zeros_like(w) for name, w in weights.items()},
        batches=fiec.Batches(len(x), p["batch"], epochs=p["epochs"], seed=p["seed"]),
        rng=np.random.default_rng(p["seed"] + 2),
        running=0.0,
        curve=[],
    )
    batches = state.batches
    run.progress(of=len(batches) * p["epochs"])

    for rows in run.each(batches):
        noisy = x[rows] + state.rng.normal(0.0, p["noise"], (len(rows), 2))
        loss, slopes = gradient(weights, noisy, arm[rows])
        for name, slope in slopes.items():
            state.momentum[name] *= 0.9
            state.momentum[name] -= p["rate"] * slope
            weights[name] += state.momentum[name]
        state.running += loss * len(rows) / len(x)
        run.progress(loss=loss)
        if batches.position == len(x):
            state.curve.append(state.running)
            state.running = 0.0
            run.progress(f"epoch {batches.epoch + 1}, loss {state.curve[-1]:.4f}")
            if (batches.epoch + 1) % p["keep"] == 0:
                # A name of its own: what an earlier commit made visible is never changed.
                run.output(f"weights-{batches.epoch + 1:04}.npy", flat(weights))
        time.sleep(p["pause_ms"] / 1000)

    run.output("weights.npy", flat(weights))
    run.output("loss.csv", "".join(f"{n},{v!r}\n" for n, v in enumerate(state.curve, 1)))
    odds = forward(weights, x)[2]
    return {
        "loss": state.curve[-1],
        "first_loss": state.curve[0],
        "accuracy": float((odds.argmax(axis=1) == arm).mean()),
        "weights_sha256": hashlib.sha256(flat(weights).tobytes()).hexdigest(),
    }


if __name__ == "__main__":
    fiec.main(main)
