"""A trainer of Lightning that is cut at its boundaries ends with the bits of a whole one."""

from __future__ import annotations

import importlib.util
import logging
import unittest
import warnings
from typing import Any

import fiec
from fiec import testing

from .test_torch import SEED, Noisy, digest, draw_of_the_process, equal_when_cut, network

HAS = importlib.util.find_spec("lightning") is not None


def module(params: dict[str, Any]) -> Any:
    import lightning.pytorch as pl
    import torch
    from torch.optim import lr_scheduler

    module: Any = pl.LightningModule

    class Net(module):  # type: ignore[misc]
        """With hooks that compute after a batch, after a validation and after an epoch."""

        def __init__(self) -> None:
            super().__init__()
            self.save_hyperparameters({"object": object()})
            self.net = network()
            self.mean: Any
            self.register_buffer("mean", torch.zeros(()))
            self.seen: list[str] = []

        def training_step(self, batch: Any, at: int) -> Any:
            loss = torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])
            self.log("loss", loss)
            return loss

        def validation_step(self, batch: Any, at: int) -> None:
            self.log("val/loss", torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1]))

        def on_train_batch_end(self, *_: Any) -> None:
            self.mean = 0.9 * self.mean + 0.1 * next(self.parameters()).mean().detach()
            self.mean += draw_of_the_process()

        def on_validation_epoch_end(self) -> None:
            self.mean += draw_of_the_process()

        def on_train_epoch_end(self) -> None:
            self.mean *= 1 + draw_of_the_process()

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
            if params.get("scheduler") == "plateau":
                plateau: Any = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
                chosen = {"scheduler": plateau, "monitor": "val/loss"}
            else:
                step: Any = lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=60)
                chosen = {"scheduler": step, "interval": "step"}
            return {"optimizer": optimizer, "lr_scheduler": chosen}

    return Net()


def train(run: fiec.Run) -> dict[str, Any]:
    import lightning.pytorch as pl
    from torch.utils.data import DataLoader

    import fiec.torch
    import fiec.torch.lightning

    p = run.params
    fiec.torch.deterministic()
    rng = fiec.GlobalRandom(SEED)
    model = module(p)
    data: Any = Noisy(23)
    plain: Any = DataLoader
    loader: Any
    if p.get("stateful"):
        import torch
        from torchdata.stateful_dataloader import StatefulDataLoader

        generator = torch.Generator().manual_seed(SEED)
        own = StatefulDataLoader(data, batch_size=4, shuffle=True, generator=generator)
        loader = fiec.torch.StatefulLoader(own)
    else:
        loader = fiec.torch.Loader(plain(data, batch_size=4, shuffle=True), seed=SEED)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1,
        **{"max_epochs": 3} | p.get("trainer", {}),
    )
    validation: Any = plain(Noisy(9), batch_size=4)
    fiec.torch.lightning.fit(run, trainer, model, loader, rng=rng, val_dataloaders=validation)
    optimizer = trainer.optimizers[0]
    return {
        "model": digest(model.state_dict()),
        "optimizer": digest(optimizer),
        "scheduler": digest(trainer.lr_scheduler_configs[0].scheduler),
        "rng": digest(rng),
        "mean": float(model.mean),
        "steps": trainer.global_step,
        "epoch": trainer.current_epoch,
    }


@unittest.skipUnless(HAS, "Lightning is not installed for this Python")
class Lightning(unittest.TestCase):
    def setUp(self) -> None:
        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        warnings.filterwarnings("ignore", module="lightning.*")

    def equal(self, capsules: int, **params: Any) -> None:
        equal_when_cut(self, train, capsules, (1, 4, 6), params)

    def test_a_trainer_that_is_cut_ends_with_equal_bits(self) -> None:
        self.equal(18)

    def test_cuts_beside_validations_within_an_epoch_change_nothing(self) -> None:
        self.equal(18, trainer={"val_check_interval": 2})

    def test_a_plateau_is_seen_once(self) -> None:
        self.equal(18, scheduler="plateau")

    def test_gradients_that_accumulate_are_never_cut(self) -> None:
        self.equal(9, trainer={"accumulate_grad_batches": 2})

    def test_an_epoch_that_is_limited_starts_anew(self) -> None:
        self.equal(12, trainer={"limit_train_batches": 4})

    def test_a_limit_of_steps_ends_within_an_epoch(self) -> None:
        self.equal(10, trainer={"max_steps": 10, "max_epochs": -1})

    def test_a_loader_of_torchdata_keeps_its_place(self) -> None:
        self.equal(18, stateful=True)

    def test_a_loader_without_a_position_is_refused(self) -> None:
        import lightning.pytorch as pl

        import fiec.torch.lightning

        def main(run: fiec.Run) -> None:
            trainer = pl.Trainer(accelerator="cpu", devices=1, logger=False)
            plain: Any = []
            fiec.torch.lightning.fit(run, trainer, module({}), plain, rng=fiec.GlobalRandom(SEED))

        refused = testing.run(main)
        self.assertEqual(refused.ending, "failed")
        self.assertIn("put it into a fiec.torch.Loader", refused.reason or "")


if __name__ == "__main__":
    unittest.main()
