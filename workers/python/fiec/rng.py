"""The random state that a process has once: that of ``random``, ``numpy.random`` and PyTorch."""

from __future__ import annotations

import contextlib
import os
import random
import sys
import warnings
from collections.abc import Iterator
from typing import Any

_seeded = False


def _warn_of_fork() -> None:
    global _seeded
    if _seeded:
        _seeded = False  # once
        warnings.warn(
            "a process forks after fiec.GlobalRandom was seeded: its children draw equal random "
            "numbers from numpy.random and torch, and from random other ones in every run. Give "
            "each task a generator of its own, seeded by its number",
            RuntimeWarning,
            stacklevel=3,
        )


os.register_at_fork(before=_warn_of_fork)


@contextlib.contextmanager
def children_are_seeded() -> Iterator[None]:
    """Does not warn of forks within: their children seed themselves."""
    global _seeded
    before, _seeded = _seeded, False
    try:
        yield
    finally:
        _seeded = before


class GlobalRandom:
    """Seeds the generators that libraries use without being told, and carries them in the state.

    ``run.state(model=model, rng=fiec.GlobalRandom(seed=0))``. Import the libraries before this is
    made. Generators of one's own (``random.Random``, ``numpy.random.Generator``) are better: they
    are put into the state directly. Forked children must not draw from it: that is warned of.
    """

    def __init__(self, seed: int = 0) -> None:
        global _seeded
        _seeded = True
        # The state of CUDA generators, also on a node without CUDA that they came to.
        self._cuda: Any = None
        random.seed(seed)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(seed % 2**32)
        if "torch" in sys.modules:
            sys.modules["torch"].manual_seed(seed)

    def state_dict(self) -> dict[str, Any]:
        """The state of each library that is loaded."""
        state: dict[str, Any] = {"random": random.getstate()}
        if "numpy" in sys.modules:
            state["numpy"] = sys.modules["numpy"].random.get_state(legacy=False)
        if "torch" in sys.modules:
            torch = sys.modules["torch"]
            state["torch"] = torch.get_rng_state()
            if torch.cuda.is_available() and torch.cuda.is_initialized():
                self._cuda = torch.cuda.get_rng_state_all()
            if self._cuda is not None:
                state["cuda"] = self._cuda
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from a state."""
        missing = [m for m in ("numpy", "torch") if m in state and m not in sys.modules]
        if missing:
            raise ValueError(f"{', '.join(missing)} must be imported first")
        random.setstate(state["random"])
        if "numpy" in state:
            sys.modules["numpy"].random.set_state(state["numpy"])
        if "torch" in state:
            torch = sys.modules["torch"]
            torch.set_rng_state(state["torch"])
            self._cuda = state.get("cuda")
            if self._cuda is not None and torch.cuda.is_available():
                for number, device in zip(range(torch.cuda.device_count()), self._cuda):
                    torch.cuda.set_rng_state(device, number)
