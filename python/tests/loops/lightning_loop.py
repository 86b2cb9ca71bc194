"""Lightning with validation; on several ranks it starts the others itself, once the loaders are built."""

import os

import lightning
import torch
from common import Model, arguments, folder, log, records
from lightning.pytorch.callbacks import ModelCheckpoint

from feedline.lightning import LoaderState


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = Model()

    def training_step(self, record, _index):
        log(loader, record)
        return self.model(record)

    def validation_step(self, record, _index):
        self.log("rows", float(len(record)), reduce_fx="sum", sync_dist=True, batch_size=1)

    def on_validation_epoch_end(self):
        seen = self.trainer.callback_metrics.get("rows")
        if not self.trainer.sanity_checking and seen is not None:
            assert seen == whole, (seen, whole)

    def configure_optimizers(self):
        self.trainer.estimated_stepping_batches  # noqa: B018
        return torch.optim.SGD(self.parameters(), lr=0.01)


loader, validation = records(), records(shuffle=None)
# Every batch of every rank is full where there are several.
whole = 100 if arguments.ranks == 1 else 128
saving = ModelCheckpoint(dirpath=folder, filename="run", every_n_train_steps=1, save_top_k=-1, enable_version_counter=False)
trainer = lightning.Trainer(
    max_epochs=2, accelerator="cpu", devices=arguments.ranks, strategy="ddp" if arguments.ranks > 1 else "auto",
    callbacks=[saving, LoaderState()], logger=False, enable_progress_bar=False, enable_model_summary=False, val_check_interval=2,
)  # fmt: skip
place = f"{folder}/run.ckpt"
if os.path.exists(place):
    print("resumed")
trainer.fit(Module(), loader, validation, ckpt_path=place if os.path.exists(place) else None)
