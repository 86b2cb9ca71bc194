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
        if self.training:
            log(loader, record)
        loss = self.model(record)
        return {"loss": loss, "logits": record.long().sum(dim=1)}


class Run(Trainer):
    def get_train_dataloader(self):
        return loader

    def get_eval_dataloader(self, eval_dataset=None):
        return records(output="dict", shuffle=None)

    def get_test_dataloader(self, test_dataset):
        return records(output="dict", shuffle=None)


loader = records(output="dict")
arguments = TrainingArguments(
    output_dir=f"{folder}/run", num_train_epochs=2, save_strategy="steps", save_steps=1, label_names=[],
    report_to=[], use_cpu=True, disable_tqdm=True, eval_strategy="steps", eval_steps=3,
)  # fmt: skip
last = get_last_checkpoint(arguments.output_dir) if __import__("os").path.isdir(arguments.output_dir) else None
if last:
    print("resumed")
# Trainer wants a dataset where it evaluates; the loader is that of `get_eval_dataloader`.
run = Run(Wrapped(), arguments, callbacks=[LoaderState(loader)], eval_dataset=[0])
run.train(resume_from_checkpoint=last)
said = torch.from_numpy(run.predict(None).predictions[-1])
every = torch.cat([batch["record"].long().sum(dim=1) for batch in records(output="dict", shuffle=None, shard=None)])
assert torch.equal(said, every), (said, every)
