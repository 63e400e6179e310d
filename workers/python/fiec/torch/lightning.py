"""A ``Trainer`` of Lightning as a sequence of capsules.

::

    import fiec.torch.lightning

    def main(run: fiec.Run) -> None:
        fiec.torch.deterministic(threads=1)
        rng = fiec.GlobalRandom(0)                       # before the model: it draws the weights
        trainer = Trainer(max_epochs=10, devices=1, logger=False, enable_checkpointing=False)
        loader = fiec.torch.Loader(DataLoader(data, batch_size=32, shuffle=True))
        fiec.torch.lightning.fit(run, trainer, Net(), loader, rng=rng)

``workers/python/TORCH.md`` says what travels. Only this module imports Lightning.
"""

from __future__ import annotations

import importlib
import pathlib
import sys
import tempfile
from collections.abc import Iterator
from typing import Any

import torch

from ..errors import Failed
from ..rng import GlobalRandom, children_are_seeded
from ..run import Run
from . import state
from .loaders import Loader, StatefulLoader
from .training import Training

# The package has two names. Whichever the program has imported is meant.
_OLD = "pytorch_lightning.callbacks"
_callbacks: Any = importlib.import_module(
    _OLD if _OLD in sys.modules else "lightning.pytorch.callbacks"
)
# Objects of any kind that Lightning keeps for people.
_FOR_PEOPLE = ("hyper_parameters", "hparams_name", "hparams_type", "datamodule_hyper_parameters")


class _Training(Training):
    def checkpoint(self) -> dict[str, Any]:
        made = self._trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        return {name: part for name, part in made.items() if name not in _FOR_PEOPLE}

    def write(self, path: pathlib.Path) -> str | None:
        """Writes the checkpoint for the trainer to read, if the run is resumed."""
        if (found := self.take()) is None:
            return None
        torch.save(found, path)
        return str(path)

    def resume(self) -> bool:
        resumed = super().resume()
        if resumed:
            # Else a plateau is not looked at when this epoch ends.
            self._trainer.fit_loop._restarting = False
        return resumed


class _Batches:
    """What the trainer reads. Before each batch but the first one is a boundary: whatever follows
    a batch (hooks, validation, the end of an epoch) belongs to its capsule."""

    def __init__(
        self, run: Run, trainer: Any, loader: Loader | StatefulLoader, training: _Training
    ) -> None:
        self._run = run
        self._trainer = trainer
        self._loader = loader
        self._training = training
        self._items: Iterator[Any] | None = None
        self._has_computed = False
        self.file: pathlib.Path | None = None

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        # The trainer asks for no batch after the last one, so the loader has not seen the end.
        if self._items is not None:
            if isinstance(self._loader, Loader):
                self._loader.end_epoch()
            else:
                next(self._items, None)
        self._boundary()
        self._items = iter(self._loader)
        for batch in self._items:
            self._has_computed = True
            yield batch
            self._boundary()

    def _boundary(self) -> None:
        if not self._has_computed:
            self._training.resume()
            if self.file is not None:
                self.file.unlink(missing_ok=True)
        elif not self._trainer.fit_loop._should_accumulate():
            # Gradients that accumulate are not in a checkpoint.
            self._run.boundary()

    def state_dict(self) -> dict[str, Any]:
        """For Lightning, which puts it into the checkpoint."""
        return self._loader.state_dict()

    def load_state_dict(self, found: dict[str, Any]) -> None:
        """For Lightning."""
        self._loader.load_state_dict(found)


class _Numbers(_callbacks.Callback):  # type: ignore[misc]
    """What the module logs, as curves of the run."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step % trainer.log_every_n_steps == 0:
            note = f"epoch {trainer.current_epoch + 1}, step {trainer.global_step}"
            self._run.progress(note, **_plain(trainer.callback_metrics))

    def on_validation_end(self, trainer: Any, *_: Any) -> None:
        if not trainer.sanity_checking:
            self._run.progress(**_plain(trainer.callback_metrics))


def _plain(metrics: dict[str, Any]) -> dict[str, Any]:
    return {name: float(value) for name, value in metrics.items()}


def fit(
    run: Run,
    trainer: Any,
    model: Any,
    loader: Loader | StatefulLoader,
    *,
    rng: GlobalRandom,
    **more: Any,
) -> None:
    """``trainer.fit(model, loader, **more)`` as a sequence of capsules.

    Each optimizer step is a capsule, with all that follows it until the next batch is read. What
    the module logs becomes curves (:meth:`fiec.Run.progress`), at most 24 names.

    Raises :class:`fiec.Failed` for a trainer of several devices, and for a loader that has no
    position."""
    if trainer.world_size != 1:
        raise Failed(f"this trainer has {trainer.world_size} devices; give it devices=1")
    if not isinstance(loader, (Loader, StatefulLoader)):
        raise Failed("this loader has no position; put it into a fiec.torch.Loader")
    if isinstance(loader, StatefulLoader) and trainer.limit_train_batches != 1.0:
        raise Failed("limit_train_batches needs a fiec.torch.Loader; another one ends at its end")
    training = _Training(trainer, rng)
    state(run, training=training)
    batches = _Batches(run, trainer, loader, training)
    trainer.callbacks.append(_Numbers(run))
    with tempfile.TemporaryDirectory(prefix="fiec-") as folder:
        batches.file = pathlib.Path(folder) / "resumed.ckpt"
        # PyTorch seeds the workers of loaders.
        with children_are_seeded():
            trainer.fit(model, batches, ckpt_path=training.write(batches.file), **more)
