"""Train with Lightning, and go on from a checkpoint in the middle of an epoch."""

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn

import feedline.torch as fl
from feedline.lightning import LoaderState
from small_data import folder, pictures

TRAIN, VALIDATION, RUN = pictures(200), pictures(40, seed=2), folder()  # yours: folders


class Classifier(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.AvgPool2d(4), nn.Flatten(), nn.Linear(192, 4))
        self.seen: list[int] = []

    def training_step(self, batch, _index):
        images, labels = batch
        self.seen.append(int(images.sum()))
        return nn.functional.cross_entropy(self.model(images), labels)

    def validation_step(self, batch, _index):
        images, labels = batch
        self.log("accuracy", (self.model(images).argmax(1) == labels).float().mean(), batch_size=len(labels))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def train(steps: int, checkpoint: str | None = None) -> Classifier:
    pictures_as = {"size": 32, "dtype": "f32", "batch_size": 16}
    saving = ModelCheckpoint(RUN, every_n_train_steps=5, save_top_k=-1, filename="{step}")
    # LoaderState puts where the loader stands into each checkpoint.
    callbacks = [saving, LoaderState()]
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = lightning.Trainer(max_steps=steps, callbacks=callbacks, num_sanity_val_steps=0, **quiet)
    model = Classifier()
    train_loader = fl.images(TRAIN, shuffle=42, **pictures_as)
    trainer.fit(model, train_loader, fl.images(VALIDATION, **pictures_as), ckpt_path=checkpoint)
    return model


torch.manual_seed(1)
whole = train(30)
rest = train(30, checkpoint=f"{RUN}/step=20.ckpt")  # yours: "last"
print(f"{len(whole.seen)} steps, and {len(rest.seen)} from the checkpoint")
assert rest.seen == whole.seen[20:], "the same batches in the same order"
