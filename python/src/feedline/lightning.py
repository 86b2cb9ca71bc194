"""Callbacks for Lightning: states of loaders in checkpoints, and their scalars in its loggers."""

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
from ._observe import Watch, facts, rows

__all__ = ["LoaderLog", "LoaderState", "Observe"]


def _loaders(trainer: Any) -> list[Loader[Any]]:
    given = trainer.train_dataloader
    combined = given if isinstance(given, CombinedLoader) else CombinedLoader(given)
    return [loader for loader in combined.flattened if isinstance(loader, Loader)]


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

    def state_dict(self) -> dict[str, Any]:
        return {"loaders": [loader.state_dict() for loader in _loaders(self._trainer)]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._saved = state_dict["loaders"]

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        saved, self._saved = self._saved, []
        loaders = _loaders(trainer)
        if saved and len(saved) != len(loaders):
            raise ValueError(f"the checkpoint has states of {len(saved)} loaders, and the training has {len(loaders)}")
        progress = trainer.fit_loop.epoch_progress.current
        for loader, state in zip(loaders, saved):
            loader.load_state_dict(state)
            if progress.started == progress.processed:
                # An epoch begins, which every loader starts anew, whatever pass a shorter one was in.
                loader.resume(loader.state(0))


class LoaderLog(Callback):  # type: ignore[misc]
    """Writes `loader.log()` of the train loaders to the trainer's loggers, every `log_every_n_steps` steps.

        trainer = Trainer(callbacks=[LoaderLog()])

    The loggers of rank 0 write, so the scalars are those of rank 0. Of several loaders the second one's names begin with
    `feedline/1/`, and so on.
    """

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        # A step that only accumulates gradients has no optimizer's step, which would mark its end.
        if trainer.fit_loop.epoch_loop._should_accumulate():
            for loader in _loaders(trainer):
                loader.mark()
        # As Lightning's own monitors do, so that all curves have the same steps.
        if not trainer.loggers or not trainer._logger_connector.should_update_logs:
            return
        scalars: dict[str, float] = {}
        for number, loader in enumerate(_loaders(trainer)):
            scalars |= loader.log(f"feedline/{number}/" if number else "feedline/")
        for logger in trainer.loggers:
            logger.log_metrics(scalars, step=trainer.fit_loop.epoch_loop._batches_that_stepped)


class Observe(Callback, Watch):  # type: ignore[misc]
    """Measures the training loop over whatever loader it has, see `feedline.observe`.

        observe = Observe()
        Trainer(callbacks=[observe]).fit(model, loader)
        print(observe.report())

    The wait for a batch is the time from the end of a training step to the begin of the next one, other callbacks included.
    Validation does not count.
    """

    def __init__(self) -> None:
        Watch.__init__(self, {"name": "no training yet"})

    def __reduce__(self) -> Any:
        # Processes that a strategy spawns measure anew.
        return type(self), ()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        given = trainer.train_dataloader
        loaders = (given if isinstance(given, CombinedLoader) else CombinedLoader(given)).flattened
        # Settings of one of several loaders are not those of all.
        Watch.__init__(self, facts(loaders[0]) if len(loaders) == 1 else {"name": f"{len(loaders)} loaders"})

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self._observer.starts()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._observer.got(rows(batch, self._facts))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self._observer.asks()

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self._observer.leaves()

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        self._observer.asks()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self._observer.ends()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._observer.ends()
