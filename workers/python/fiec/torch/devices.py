"""The granted device, and how all tensors leave it and return."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterable
from typing import Any

import torch

from ..errors import Failed
from ..run import Grant, Run


def device(run: Run) -> torch.device:
    """Where to compute: the granted device, or the CPU. Without a worker it is the first device
    that PyTorch sees."""
    # FIEC shows a process its granted device only, so that device is the first.
    if run.grant.device is None and not run.local:
        return torch.device("cpu")
    if torch.cuda.is_available():
        return torch.device("cuda", 0)
    if run.grant.device is None:
        return torch.device("cpu")
    raise Failed(
        f"device {run.grant.device.uuid} is granted, but PyTorch {torch.__version__} sees no "
        "CUDA device; install a PyTorch for CUDA on this node, or submit without a device",
        permanent=False,
    )


def on_device() -> list[torch.Tensor]:
    """All tensors of this process that are on a CUDA device, with their gradients."""
    found = []
    for thing in gc.get_objects():
        # By its type: `isinstance` would run code of objects that pretend to be others.
        if issubclass(type(thing), torch.Tensor) and thing.is_cuda:
            found.append(thing)
            # A gradient has no Python object before it is asked for.
            if thing.is_leaf and thing.grad is not None:
                found.append(thing.grad)
    return list({id(tensor): tensor for tensor in found}.values())


def move(tensors: Iterable[torch.Tensor], target: torch.device) -> None:
    """Moves tensors in place: every name of a tensor stays good, and tensors that share memory
    (views, tied weights) share it afterwards."""
    storages: dict[int, tuple[Any, Any]] = {}
    with torch.no_grad():
        for tensor in tensors:
            old = tensor.untyped_storage()
            if old._cdata not in storages:
                # `old` is kept, so that no other storage gets its number.
                storages[old._cdata] = (_copied(old, target), old)
            moved = torch.empty(0, dtype=tensor.dtype, device=target)
            storage, _ = storages[old._cdata]
            moved.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())
            tensor.data = moved


def _copied(storage: Any, target: torch.device) -> Any:
    """The same bytes on another device."""
    raw = torch.empty(0, dtype=torch.uint8, device=storage.device)
    raw.set_(storage, 0, (storage.nbytes(),), (1,))
    return raw.to(target, copy=True).untyped_storage()


class Aside:
    """The tensors of a parked run, in main memory."""

    def __init__(self) -> None:
        self._tensors: dict[torch.device, list[torch.Tensor]] = {}

    def follow(self, grant: Grant) -> None:
        """Acts on another grant: without a device all tensors leave it, with one they return."""
        if grant.device is None:
            self.leave(on_device())
        else:
            self.come_back()

    def leave(self, tensors: Iterable[torch.Tensor]) -> None:
        """Moves tensors to main memory and frees the memory of the device."""
        left: dict[torch.device, list[torch.Tensor]] = {}
        for tensor in tensors:
            left.setdefault(tensor.device, []).append(tensor)
        for place, found in left.items():
            move(found, torch.device("cpu"))
            self._tensors.setdefault(place, []).extend(found)
        cuda: Any = torch.cuda
        if not cuda.is_initialized():
            return
        gc.collect()
        cuda.empty_cache()
        if held := cuda.memory_allocated():
            print(
                f"fiec: {held} bytes stay on the device while this run is parked: no Python "
                "object holds them (a graph of autograd, or a workspace of a library)",
                file=sys.stderr,
                flush=True,
            )

    def come_back(self) -> None:
        """Moves each tensor to the device that it left."""
        for place, found in self._tensors.items():
            move(found, place)
        self._tensors.clear()


def release_at_park(run: Run) -> None:
    """Follows the grants of a run that has a device. A run at a terminal has none in its grant."""
    if run.grant.device is not None:
        run.on_reconfigure(Aside().follow)
