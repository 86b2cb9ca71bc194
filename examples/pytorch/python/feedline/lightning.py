"""A callback for Lightning, which keeps the states of loaders in its own part of a checkpoint."""

from __future__ import annotations

import sys
from typing import Any

if "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules:
    from pytorch_lightning import Callback
    from pytorch_lightning.utilities import CombinedLoader
else:
    from lightning.pytorch import Callback  # type: ignore[assignment]
    from lightning.pytorch.utilities import CombinedLoader  # type: ignore[assignment]

from ._loader import Loader

__all__ = ["LoaderState"]


class LoaderState(Callback):  # type: ignore[misc]
    """Saves where the train loaders stand, and goes on there when the training is resumed.

        trainer = Trainer(callbacks=[LoaderState()])
        trainer.fit(model, loader, val_loader, ckpt_path="last")

    Without it Lightning keeps these states, too, but forgets to load them where the length of the training is asked for
    before (`trainer.estimated_stepping_batches`, as schedulers do).
    """

    def __init__(self) -> None:
        self._trainer: Any = None
        self._saved: list[dict[str, Any]] = []

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self._trainer = trainer

    def _loaders(self) -> list[Loader[Any]]:
        given = self._trainer.train_dataloader
        combined = given if isinstance(given, CombinedLoader) else CombinedLoader(given)
        return [loader for loader in combined.flattened if isinstance(loader, Loader)]

    def state_dict(self) -> dict[str, Any]:
        return {"loaders": [loader.state_dict() for loader in self._loaders()]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._saved = state_dict["loaders"]

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        saved, self._saved = self._saved, []
        loaders = self._loaders()
        if saved and len(saved) != len(loaders):
            raise ValueError(f"the checkpoint has states of {len(saved)} loaders, and the training has {len(loaders)}")
        progress = trainer.fit_loop.epoch_progress.current
        for loader, state in zip(loaders, saved):
            loader.load_state_dict(state)
            if progress.started == progress.processed:
                # An epoch begins, which every loader starts anew, whatever pass a shorter one was in.
                loader.resume(loader.state(0))
