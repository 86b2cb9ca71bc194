"""A callback for Transformers' Trainer, which keeps the loader's state in the Trainer's checkpoints."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from ._loader import Loader

__all__ = ["LoaderState"]

NAME = "feedline.json"


class LoaderState(TrainerCallback):
    """Saves the state of a loader with each checkpoint, and loads it when the training is resumed.

        class Run(Trainer):
            def get_train_dataloader(self):
                return loader  # with output="dict"

        Run(model, arguments, callbacks=[LoaderState(loader)]).train(resume_from_checkpoint=True)

    `TrainingArguments` need `ignore_data_skip=True`: else the Trainer would skip batches by reading them.
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
        if not args.ignore_data_skip:
            raise ValueError("the loader resumes by its state: set ignore_data_skip=True in TrainingArguments")
        self._loader.load_state_dict(json.loads(self._place(args, state).read_text()))
