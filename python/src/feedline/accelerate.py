"""What Accelerate has to know of a loop over a loader of `feedline.torch`.

Nothing is to be called: while a process has an `Accelerator`, each loop tells its `GradientState` when the last batch is out and
how many samples are in it. So `accumulate` closes its last window, and `gather_for_metrics` leaves padding out and has the
samples in the order of the epoch. `skip_first_batches(loader, n)` goes to batch n of the epoch without reading those before.
"""

from __future__ import annotations

import json
import sys
import warnings
import weakref
from typing import Any

from ._loader import Samples


def _state() -> Any:
    """Accelerate's GradientState, where there is one."""
    state: Any = sys.modules.get("accelerate.state")
    known = state is not None and state.GradientState._shared_state
    return state.GradientState() if known else None


def _processes() -> int:
    return sys.modules["accelerate.state"].PartialState().num_processes


def began(loader: Any, epoch: Any) -> None:
    """A loop of the loader opened this epoch."""
    state = _state()
    if state is None:
        return
    around = getattr(state.active_dataloader, "dataset", None)
    if isinstance(around, Samples) and around._loader is loader:
        # A DataLoader of Accelerate's own, which reports its end itself, and deals out to processes what they have already.
        if _processes() > 1:
            raise TypeError("Accelerate's data_loader.prepare_data_loader would deal out parts of parts: loop over the loader as it is")
        return
    if loader.drop_last:
        epoch.remainder = 0
    elif loader._fills_groups and loader.shard[1] > 1:
        words = "the last batch of groups is filled up, and gather_for_metrics leaves that in"
        warnings.warn(f'{words}: give last_batch="mask" and count by status, or last_batch="drop"', stacklevel=4)
    elif not loader._grouped and loader.shard[1] == _processes() and (loader.shard[1] == 1 or loader._lanes == 1):
        # In lanes the ranks take samples in turn, and padding is not at the end of what is gathered; groups have it anywhere;
        # where ranks share data, their rows are gathered several times.
        left = loader.samples_per_epoch - json.loads(loader.state())["position"]
        epoch.remainder = left % loader._batch_sizes[1]
    state._add_dataloader(epoch)
    weakref.finalize(epoch, _forget).atexit = False


def _forget() -> None:
    if (state := _state()) is not None:
        state.dataloader_references = [None] + [epoch for epoch in state.dataloader_references if epoch is not None]


def left(epoch: Any) -> None:
    """It hands out no batch any more."""
    if (state := _state()) is not None:
        state._remove_dataloader(epoch)
