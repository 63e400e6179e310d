"""What both adapters for trainers share."""

from __future__ import annotations

from typing import Any

from ..rng import GlobalRandom


class Training:
    """The part of σ that is a trainer: its checkpoint, and the random state."""

    def __init__(self, trainer: Any, rng: GlobalRandom) -> None:
        self._trainer = trainer
        self._rng = rng
        self._found: dict[str, Any] | None = None

    def checkpoint(self) -> dict[str, Any]:
        """What the trainer would write into a checkpoint."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """For σ."""
        return {"checkpoint": self.checkpoint(), "random": self._rng.state_dict()}

    def load_state_dict(self, found: dict[str, Any]) -> None:
        """Keeps it until the trainer has begun."""
        self._found = found

    def take(self) -> dict[str, Any] | None:
        """The checkpoint from which the trainer continues; ``None`` if the run is not resumed."""
        taken: dict[str, Any] | None = self._found and self._found.pop("checkpoint")
        return taken

    def resume(self) -> bool:
        """The trainer has read the checkpoint. Restores the random state. False if the run is not
        resumed."""
        if self._found is None:
            return False
        self._rng.load_state_dict(self._found["random"])
        self._found = None
        return True
