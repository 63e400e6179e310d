"""A trainer of Hugging Face that is cut at its boundaries ends with the bits of a whole one."""

from __future__ import annotations

import importlib.util
import tempfile
import unittest
import unittest.mock
from typing import Any

import fiec
from fiec import testing

from .test_torch import SEED, Noisy, digest, draw_of_the_process, equal_when_cut, network

HAS = all(importlib.util.find_spec(name) for name in ("transformers", "accelerate"))


class Rows(Noisy):
    """The same without noise: what a row draws does not travel with this trainer."""

    def __getitem__(self, row: int) -> Any:
        return {"x": self.x[row], "labels": self.y[row]}


def train(run: fiec.Run) -> dict[str, Any]:
    import torch
    from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, TrainingArguments
    from transformers.utils import logging

    import fiec.torch
    import fiec.torch.huggingface

    module: Any = torch.nn.Module
    callback: Any = TrainerCallback

    class Net(module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def forward(self, x: Any, labels: Any) -> Any:
            found = self.net(x)
            return {"loss": torch.nn.functional.cross_entropy(found, labels), "logits": found}

    class Draws(callback):  # type: ignore[misc]
        """Computes after each step, each evaluation and each epoch."""

        def _draw(self, *_: Any, **parts: Any) -> None:
            with torch.no_grad():
                next(parts["model"].parameters()).add_(0.01 * draw_of_the_process())

        on_step_end = on_evaluate = on_epoch_end = _draw

    quiet: Any = logging.set_verbosity_error
    quiet()
    fiec.torch.deterministic()
    rng = fiec.GlobalRandom(SEED)
    model: Any = Net()
    given = {
        "num_train_epochs": 3,
        "per_device_train_batch_size": 4,
        "learning_rate": 0.02,
        "lr_scheduler_type": "cosine",
        "logging_steps": 2,
        "eval_strategy": "steps",
        "eval_steps": 4,
        "metric_for_best_model": "eval_loss",
    }
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
            seed=SEED,
            **given | run.params.get("args", {}),
        )
        patience = run.params.get("patience")
        trainer: Any = Trainer(
            model=model,
            args=args,
            train_dataset=Rows(23),
            eval_dataset=Rows(9),
            callbacks=[Draws(), *([EarlyStoppingCallback(patience)] if patience else [])],
        )
        found = fiec.torch.huggingface.train(run, trainer, rng=rng)
    return {
        "model": digest(model),
        "optimizer": digest(trainer.optimizer.state_dict()),
        "scheduler": digest(trainer.lr_scheduler.state_dict()),
        "rng": digest(rng),
        "steps": found.global_step,
        "evaluated": [log["eval_loss"] for log in trainer.state.log_history if "eval_loss" in log],
    }


@unittest.skipUnless(HAS, "transformers and accelerate are not installed for this Python")
class HuggingFace(unittest.TestCase):
    def equal(self, capsules: int, cuts: tuple[int, ...] = (1, 4, 6), **params: Any) -> None:
        equal_when_cut(self, train, capsules, cuts, params)

    def test_a_trainer_that_is_cut_ends_with_equal_bits(self) -> None:
        self.equal(18)

    def test_gradients_that_accumulate_are_never_cut(self) -> None:
        self.equal(9, args={"gradient_accumulation_steps": 2})

    def test_workers_that_read_ahead_change_nothing(self) -> None:
        self.equal(18, cuts=(7,), args={"dataloader_num_workers": 2})

    def test_patience_is_counted_over_moves(self) -> None:
        self.equal(12, patience=2)

    def test_what_it_logs_becomes_curves(self) -> None:
        with unittest.mock.patch.object(fiec.Run, "progress") as progress:
            self.assertEqual(testing.run(train).ending, "completed")
        names = {name for call in progress.call_args_list for name in call.kwargs}
        self.assertEqual(names, {"of", "loss", "grad_norm", "learning_rate", "eval_loss"})

    def test_data_that_is_not_skipped_is_refused(self) -> None:
        refused = testing.run(train, {"args": {"ignore_data_skip": True}})
        self.assertEqual(refused.ending, "failed")
        self.assertIn("read the same data twice", refused.reason or "")


if __name__ == "__main__":
    unittest.main()
