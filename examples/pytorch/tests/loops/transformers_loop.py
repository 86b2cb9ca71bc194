"""Transformers' Trainer, with the callback that keeps the loader's state in its checkpoints."""

import torch
from common import Model, folder, log, records
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from feedline.transformers import LoaderState


class Wrapped(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.model = Model()

    def forward(self, record):
        log(loader, record)
        return {"loss": self.model(record)}


class Run(Trainer):
    def get_train_dataloader(self):
        return loader


loader = records(output="dict")
arguments = TrainingArguments(
    output_dir=f"{folder}/run", num_train_epochs=2, save_strategy="steps", save_steps=1, ignore_data_skip=True,
    report_to=[], use_cpu=True, disable_tqdm=True,
)  # fmt: skip
last = get_last_checkpoint(arguments.output_dir) if __import__("os").path.isdir(arguments.output_dir) else None
if last:
    print("resumed")
Run(Wrapped(), arguments, callbacks=[LoaderState(loader)]).train(resume_from_checkpoint=last)
