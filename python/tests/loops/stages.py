"""Lightning's other stages, and several loaders at once.

    python stages.py DATA FOLDER
"""

import sys
import warnings

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import CombinedLoader

import feedline.torch as fl
from feedline.lightning import LoaderState

warnings.filterwarnings("ignore")
data, folder = sys.argv[1:3]


def loader(batch_size=8, **settings):
    return fl.records(data, record_bytes=48, batch_size=batch_size, device="cpu", **settings)


ROWS = sum(len(batch) for batch in loader())
QUIET = {
    "accelerator": "cpu", "devices": 1, "logger": False, "enable_progress_bar": False, "enable_model_summary": False,
}  # fmt: skip


class Module(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer, self.rows, self.seen = torch.nn.Linear(48, 1), {}, []

    def note(self, stage, batch):
        self.rows[stage] = self.rows.get(stage, 0) + len(batch)
        return self.layer(batch.float() / 255).square().mean()

    def training_step(self, batch, _index):
        if isinstance(batch, list):
            self.seen.append([None if part is None else part.long().sum(1).tolist() for part in batch])
            return self.layer(next(part for part in batch if part is not None).float()).mean()
        return self.note("train", batch)

    def validation_step(self, batch, _index, dataloader_idx=0):
        self.note(f"val {dataloader_idx}", batch)

    def test_step(self, batch, _index):
        self.note("test", batch)

    def predict_step(self, batch, _index):
        return self.layer(batch.float())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Data(pl.LightningDataModule):
    def train_dataloader(self):
        return loader(shuffle=1)

    def val_dataloader(self):
        return [loader(), loader(5)]


def stages():
    module = Module()
    trainer = pl.Trainer(max_epochs=2, enable_checkpointing=False, num_sanity_val_steps=0, **QUIET)
    trainer.fit(module, loader(shuffle=1), [loader(), loader(5)])
    assert module.rows == {"train": 2 * ROWS, "val 0": 2 * ROWS, "val 1": 2 * ROWS}, module.rows
    for datamodule in (Data(), Data()):
        module = Module()
        pl.Trainer(max_epochs=2, enable_checkpointing=False, num_sanity_val_steps=2, **QUIET).fit(module, datamodule=datamodule)
        assert module.rows["train"] == 2 * ROWS
    module = Module()
    pl.Trainer(fast_dev_run=True, **QUIET).fit(module, loader(shuffle=1), loader())
    assert module.rows == {"train": 8, "val 0": 8}, module.rows
    # In order, so that nothing has to be replaced.
    module = Module()
    pl.Trainer(max_epochs=1, overfit_batches=2, enable_checkpointing=False, **QUIET).fit(module, loader(), loader())
    assert module.rows["train"] == 16, module.rows
    module = Module()
    trainer = pl.Trainer(**QUIET)
    trainer.validate(module, loader())
    trainer.test(module, loader())
    assert module.rows == {"val 0": ROWS, "test": ROWS}, module.rows
    said = torch.cat(trainer.predict(module, loader()))
    assert torch.equal(said, torch.cat([module.layer(batch.float()) for batch in loader()]))
    print("stages: as they should be")


class Stopped(Exception):
    pass


class End(pl.Callback):
    def __init__(self, stop):
        self.stop = stop

    def on_train_batch_start(self, trainer, module, *_):
        if len(module.seen) == self.stop:
            raise Stopped


def several(mode, stop=None, checkpoint=None):
    module = Module()
    saving = ModelCheckpoint(folder, mode, every_n_train_steps=1, save_top_k=-1, enable_version_counter=False)
    trainer = pl.Trainer(max_epochs=2, callbacks=[saving, LoaderState(), End(stop)], **QUIET)
    loaders = CombinedLoader([loader(2, shuffle=1), loader(8, shuffle=2)], mode)
    try:
        trainer.fit(module, loaders, ckpt_path=checkpoint)
    except Stopped:
        pass
    return module.seen


stages()
for mode in ("max_size_cycle", "max_size", "min_size"):
    whole = several(mode)
    for stop in (1, 3, 4, 5, 9, len(whole) // 2, len(whole) // 2 + 1, len(whole) - 1):
        if stop < len(whole):
            parts = several(mode, stop) + several(mode, None, f"{folder}/{mode}.ckpt")
            assert parts == whole, (mode, stop, len(parts), len(whole), [i for i, (a, b) in enumerate(zip(parts, whole)) if a != b])
    print(f"{mode}: {len(whole)} steps")
