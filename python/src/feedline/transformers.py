"""For Transformers' Trainer: the state of a loader in its checkpoints, and the loader's scalars in its logs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from ._loader import Loader
from ._observe import Observed, observe

__all__ = ["LoaderLog", "LoaderState", "Observe"]

NAME = "feedline.json"


class LoaderState(TrainerCallback):
    """Saves the state of a loader with each checkpoint, and loads it when the training is resumed.

        class Run(Trainer):
            def get_train_dataloader(self):
                return loader  # with output="dict"

        Run(model, arguments, callbacks=[LoaderState(loader)]).train(resume_from_checkpoint=True)

    With the same `TrainingArguments` a training resumes without it, too: the Trainer counts batches and skips them, which
    reads nothing. The state also checks that data and order are the same ones.
    """

    def __init__(self, loader: Loader[Any]):
        self._loader = loader

    def _place(self, arguments: Any, state: Any) -> Path:
        return Path(arguments.output_dir) / f"checkpoint-{state.global_step}" / NAME

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.is_world_process_zero:
            self._place(args, state).write_text(json.dumps(self._loader.state_dict()))

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == 0:
            return
        self._loader.load_state_dict(json.loads(self._place(args, state).read_text()))


class LoaderLog(TrainerCallback):
    """Adds `loader.log()` to what the Trainer logs, every `logging_steps` steps, and so to TensorBoard, wandb and others.

        trainer = Run(model, arguments)
        LoaderLog(loader).add_to(trainer)

    Process 0 writes, so the scalars are those of its rank.
    """

    def __init__(self, loader: Loader[Any]):
        self._loader = loader

    def add_to(self, trainer: Any) -> None:
        """In front of the other callbacks, which write what they get."""
        trainer.callback_handler.callbacks.insert(0, self)

    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        # A step that only accumulates gradients has no optimizer's step, which would mark its end.
        self._loader.mark()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        # Logs of an evaluation, and the summary at the end, are of other times.
        if logs is not None and "loss" in logs:
            logs.update(self._loader.log())


class Observe:
    """Measures the training loop of a Trainer over whatever loader it has, see `feedline.observe`.

        trainer = Trainer(model, arguments, train_dataset=data)
        observed = Observe().add_to(trainer)
        trainer.train()
        print(observed.report())
    """

    def __init__(self) -> None:
        self._observed: Observed[Any] | None = None

    def add_to(self, trainer: Any) -> Observe:
        """Measures the loader that `trainer.get_train_dataloader()` gives."""
        given = trainer.get_train_dataloader

        def get_train_dataloader() -> Any:
            self._observed = observe(given())
            return self._observed

        trainer.get_train_dataloader = get_train_dataloader
        return self

    @property
    def observed(self) -> Observed[Any]:
        """The loader of the last training."""
        if self._observed is None:
            raise RuntimeError("nothing is observed yet: add_to(trainer), then trainer.train()")
        return self._observed

    def report(self) -> str:
        return self.observed.report()

    def verdict(self) -> dict[str, Any]:
        return self.observed.verdict()

    def _repr_html_(self) -> str:
        return self.observed._repr_html_()
