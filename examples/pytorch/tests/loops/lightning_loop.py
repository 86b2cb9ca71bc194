"""Lightning: the loader's state is in its checkpoints."""

import os

import lightning
import torch
from common import Model, folder, log, records
from lightning.pytorch.callbacks import ModelCheckpoint


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = Model()

    def training_step(self, record, _index):
        log(loader, record)
        return self.model(record)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


loader = records()
saving = ModelCheckpoint(dirpath=folder, filename="run", every_n_train_steps=1, save_top_k=-1, enable_version_counter=False)
trainer = lightning.Trainer(
    max_epochs=2, accelerator="cpu", devices=1, callbacks=[saving], logger=False, enable_progress_bar=False,
    enable_model_summary=False,
)  # fmt: skip
place = f"{folder}/run.ckpt"
if os.path.exists(place):
    print("resumed")
trainer.fit(Module(), loader, ckpt_path=place if os.path.exists(place) else None)
