"""A ``Trainer`` of Hugging Face's transformers as a sequence of capsules.

::

    import fiec.torch.huggingface

    def main(run: fiec.Run) -> None:
        fiec.torch.deterministic(threads=1)
        rng = fiec.GlobalRandom(0)                       # before the model: it draws the weights
        args = TrainingArguments("out", save_strategy="no", disable_tqdm=True, report_to="none")
        trainer = Trainer(model=model, args=args, train_dataset=data)
        fiec.torch.huggingface.train(run, trainer, rng=rng)

``workers/python/TORCH.md`` says what travels. Only this module imports transformers.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import math
import pathlib
import re
import tempfile
from typing import Any

import torch

from ..errors import Failed
from ..rng import GlobalRandom, children_are_seeded
from ..run import Run
from . import state
from .training import Training

_callback: Any = importlib.import_module("transformers.trainer_callback")
# Figures of time, and what is logged once at the end: no curves.
_NO_CURVES = re.compile(r"epoch|train_.*|total_.*|.*_runtime|.*_per_second")
# The files of a checkpoint, as `Trainer` names them.
_MODEL, _OPTIMIZER, _SCHEDULER = "pytorch_model.bin", "optimizer.pt", "scheduler.pt"
_SCALER, _TRAINER = "scaler.pt", "trainer_state.json"


class _Training(Training):
    def checkpoint(self) -> dict[str, Any]:
        trainer = self._trainer
        said = dataclasses.replace(trainer.state, stateful_callbacks=self._callbacks())
        scaler = trainer.accelerator.scaler
        return {
            _MODEL: trainer.model.state_dict(),
            _OPTIMIZER: trainer.optimizer.state_dict(),
            _SCHEDULER: trainer.lr_scheduler.state_dict(),
            **({} if scaler is None else {_SCALER: scaler.state_dict()}),
            _TRAINER: json.dumps(dataclasses.asdict(said)),
        }

    def _callbacks(self) -> dict[str, Any]:
        """Of those that count something, such as ``EarlyStoppingCallback``."""
        found: dict[str, Any] = {}
        handler = self._trainer.callback_handler
        for callback in [*handler.callbacks, self._trainer.control]:
            if isinstance(callback, _callback.ExportableState):
                found.setdefault(type(callback).__name__, []).append(callback.state())
        return {name: many[0] if len(many) == 1 else many for name, many in found.items()}

    def write(self, folder: pathlib.Path) -> str | None:
        """Writes a checkpoint for the trainer to read, if the run is resumed."""
        if (found := self.take()) is None:
            return None
        (folder / _TRAINER).write_text(found.pop(_TRAINER))
        for name, part in found.items():
            torch.save(part, folder / name)
        return str(folder)


class _Capsules(_callback.TrainerCallback):  # type: ignore[misc]
    """Before each step but the first one is a boundary: whatever follows a step (logs, evaluation,
    the end of an epoch) belongs to its capsule."""

    def __init__(self, run: Run, training: _Training, folder: pathlib.Path) -> None:
        self._run = run
        self._training = training
        self._folder = folder
        self._has_computed = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        for file in self._folder.iterdir():
            file.unlink()

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._has_computed:
            self._run.progress(of=state.max_steps)
            self._run.boundary()
        else:
            self._training.resume()
        self._has_computed = True

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        numbers: dict[str, Any] = {
            name: float(value)
            for name, value in (logs or {}).items()
            if isinstance(value, (int, float)) and not _NO_CURVES.fullmatch(name)
        }
        epoch = math.ceil(state.epoch or 0)
        self._run.progress(f"epoch {epoch}, step {state.global_step}", **numbers)


def train(run: Run, trainer: Any, *, rng: GlobalRandom) -> Any:
    """``trainer.train()`` as a sequence of capsules. Returns what that returns.

    Each optimizer step is a capsule, with all that follows it until the next one begins. What the
    trainer logs becomes curves (:meth:`fiec.Run.progress`).

    Raises :class:`fiec.Failed` for a trainer of several processes or devices, DeepSpeed or FSDP,
    and for one that skips no data."""
    args = trainer.args
    if args.world_size != 1 or args.n_gpu > 1 or trainer.is_deepspeed_enabled:
        raise Failed("this trainer has several processes or devices; FIEC moves those with one")
    if args.ignore_data_skip:
        raise Failed("with ignore_data_skip a moved run would read the same data twice")
    args.restore_callback_states_from_checkpoint = True
    training = _Training(trainer, rng)
    state(run, training=training)
    with tempfile.TemporaryDirectory(prefix="fiec-") as name:
        folder = pathlib.Path(name)
        trainer.add_callback(_Capsules(run, training, folder))
        # PyTorch seeds the workers of loaders.
        with children_are_seeded():
            return trainer.train(resume_from_checkpoint=training.write(folder))
