"""What a training loop of PyTorch needs to pause, move and resume with equal bits.

::

    import fiec.torch

    def main(run: fiec.Run) -> None:
        fiec.torch.deterministic(threads=1)
        rng = fiec.GlobalRandom(0)                      # before the model: it draws the weights
        device = fiec.torch.device(run)                 # the granted one, or the CPU
        model = Net().to(device)
        optimizer = torch.optim.AdamW(model.parameters())
        loader = fiec.torch.Loader(DataLoader(data, batch_size=32, shuffle=True, num_workers=2))
        fiec.torch.state(run, model=model, optimizer=optimizer, loader=loader, rng=rng)
        for _ in range(loader.epoch, 10):               # a resumed run begins in its epoch
            for x, y in run.each(loader):               # and behind the last batch it has computed
                ...

``workers/python/TORCH.md`` says what the bits depend on. Only this module imports PyTorch; the rest
of the kit works without it.
"""

from __future__ import annotations

import os
from typing import Any

import torch as _torch

from ..rng import GlobalRandom
from ..run import Run, State
from .devices import device, on_device, release_at_park
from .loaders import Loader, StatefulLoader

__all__ = ["Loader", "StatefulLoader", "deterministic", "device", "on_device", "state"]


def deterministic(threads: int = 1) -> None:
    """Makes PyTorch choose algorithms whose bits do not change from run to run.

    The bits depend on ``threads``: make it a parameter, and never take it from the grant.
    Call this before anything is computed, because cuBLAS reads its setting once."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    _torch.use_deterministic_algorithms(True)
    _torch.backends.cudnn.benchmark = False
    _torch.set_num_threads(threads)


def state(run: Run, **parts: Any) -> State:
    """``run.state(**parts)`` for a loop of PyTorch.

    Random state is restored last, whatever the order of ``parts``. If the execution parks
    without its device, all tensors leave the device. They return when it continues."""
    generators = {name: part for name, part in parts.items() if isinstance(part, GlobalRandom)}
    others = {name: part for name, part in parts.items() if name not in generators}
    found = run.state(**others, **generators)
    if run.resumed:
        for part in others.values():
            if isinstance(part, _torch.optim.Optimizer):
                # Else a scheduler warns that the optimizer has not made a step before it.
                vars(part)["_opt_called"] = True
    release_at_park(run)
    return found
