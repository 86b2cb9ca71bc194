"""A training is stopped behind each of its steps and resumed: rows and steps are those of an uninterrupted one.

    python every_step.py KIND DATA FOLDER          torchrun --nproc-per-node 2 every_step.py KIND DATA FOLDER
"""

import itertools
import json
import os
import sys
import warnings

import torch
import torch.distributed as dist

import feedline.torch as fl

warnings.filterwarnings("ignore")
kind, data, folder = sys.argv[1:4]
EPOCHS, BATCH = 3, 8


class Stopped(Exception):
    """The training ends here."""


class Run:
    """What one training saw, until it is stopped behind a step."""

    def __init__(self, stop):
        self.rows, self.stop = [], stop
        self.loader = fl.records(data, record_bytes=48, batch_size=BATCH, shuffle=5, device="cpu", output="dict")

    def step(self, batch):
        self.rows.append(batch["record"].long().sum(dim=1).tolist())

    def end_of_step(self):
        if len(self.rows) == self.stop:
            raise Stopped


def plain(run, place, resumes, epochs_of):
    """A loop that saves its epoch and the loader's state behind each step."""
    start = 0
    if resumes:
        saved = torch.load(place, weights_only=True)
        run.loader.load_state_dict(saved["loader"])
        start = saved["epoch"]
    for epoch, batches in epochs_of(run.loader, start):
        for batch in batches:
            run.step(batch)
            torch.save({"epoch": epoch, "loader": run.loader.state_dict()}, place)
            run.end_of_step()


def by_loop(loader, start):
    for epoch in range(start, EPOCHS):
        yield epoch, loader


def by_set_epoch(loader, start):
    for epoch in range(start, EPOCHS):
        loader.set_epoch(epoch)
        yield epoch, loader


def by_sampler(loader, _start):
    # As Lightning does: from epoch 0, whatever was done.
    for epoch in range(EPOCHS):
        loader.sampler.set_epoch(epoch)
        yield epoch, loader


def by_number(loader, start):
    for epoch in range(start, EPOCHS):
        yield epoch, loader.epoch(epoch)


def by_next_epoch(loader, _start):
    for epoch in range(loader.next_epoch, EPOCHS):
        yield epoch, loader


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(48, 1)

    def forward(self, record):
        return {"loss": self.layer(record.float() / 255).square().mean()}


def accelerate(run, place, resumes, skips):
    """Accelerate with checkpoints of its own, or with steps that are skipped."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = Model()
    model, optimiser, loader = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01), run.loader)
    done, shared = 0, place.rpartition("-")[0] + ".acc"
    if resumes:
        with open(place) as file:
            done = json.load(file)
    if not skips:
        accelerator.register_for_checkpointing(loader)
        if resumes:
            accelerator.load_state(shared)
            # The first step of a window sends nothing: a rank would write to it before another has read it.
            accelerator.wait_for_everyone()
    closed = 0
    for epoch in range(done // len(loader), EPOCHS):
        loader.set_epoch(epoch)
        batches = loader
        if skips and epoch == done // len(loader):
            batches = accelerator.skip_first_batches(loader, done % len(loader))
        for batch in batches:
            with accelerator.accumulate(model):
                optimiser.zero_grad()
                accelerator.backward(model(**batch)["loss"])
                optimiser.step()
            closed = accelerator.sync_gradients
            run.step(batch)
            done += 1
            with open(place, "w") as file:
                json.dump(done, file)
            if not skips:
                accelerator.save_state(shared)
            run.end_of_step()
        assert closed, "the last window of an epoch is open"


def lightning(run, place, resumes, callback, validates):
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import ModelCheckpoint

    from feedline.lightning import LoaderState

    class Module(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = Model()

        def training_step(self, batch, _index):
            run.step(batch)
            return self.model(**batch)["loss"]

        def on_train_batch_end(self, *_):
            # Behind the callbacks, and so behind the checkpoint.
            run.end_of_step()

        def validation_step(self, batch, _index):
            self.log("seen", float(len(batch["record"])), reduce_fx="sum", batch_size=1)

        def configure_optimizers(self):
            if callback:
                self.trainer.estimated_stepping_batches  # noqa: B018
            return torch.optim.SGD(self.parameters(), lr=0.01)

    saving = ModelCheckpoint(
        dirpath=place, filename="run", every_n_train_steps=1, save_top_k=-1, enable_version_counter=False
    )
    validation = {"val_check_interval": 2} if validates else {"limit_val_batches": 0}
    trainer = pl.Trainer(
        max_epochs=EPOCHS, accelerator="cpu", devices=1, callbacks=[saving, *([LoaderState()] if callback else [])],
        logger=False, enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=1, **validation,
    )  # fmt: skip
    other = fl.records(data, record_bytes=48, batch_size=BATCH, device="cpu", output="dict")
    trainer.fit(Module(), run.loader, other, ckpt_path=f"{place}/run.ckpt" if resumes else None)


def trainer(run, place, resumes, callback):
    from transformers import Trainer, TrainerCallback, TrainingArguments
    from transformers.trainer_utils import get_last_checkpoint

    from feedline.transformers import LoaderState

    class Training(Trainer):
        def get_train_dataloader(self):
            return run.loader

        def training_step(self, model, inputs, *rest, **more):
            run.step(inputs)
            return super().training_step(model, inputs, *rest, **more)

    class End(TrainerCallback):
        def on_save(self, args, state, control, **_):
            run.end_of_step()

    arguments = TrainingArguments(
        output_dir=place, num_train_epochs=EPOCHS, save_strategy="steps", save_steps=1, ignore_data_skip=callback,
        report_to=[], use_cpu=True, disable_tqdm=True, logging_strategy="no", save_total_limit=2,
    )  # fmt: skip
    callbacks = [*([LoaderState(run.loader)] if callback else []), End()]
    training = Training(Model(), arguments, callbacks=callbacks)
    assert training.num_examples(run.loader) == len(run.loader.dataset) == run.loader.samples_per_epoch
    training.train(resume_from_checkpoint=get_last_checkpoint(place) if resumes else None)


KINDS = {
    "plain": [lambda *run, way=way: plain(*run, way) for way in (by_loop, by_set_epoch, by_sampler, by_number, by_next_epoch)],
    "accelerate": [lambda *run, skips=skips: accelerate(*run, skips) for skips in (False, True)],
    "lightning": [lambda *run: lightning(*run, True, True), lambda *run: lightning(*run, False, False)],
    "trainer": [lambda *run: trainer(*run, True), lambda *run: trainer(*run, False)],
}

if "RANK" in os.environ and kind == "plain":
    dist.init_process_group("gloo")
for number, train in enumerate(KINDS[kind]):
    whole = Run(None)
    train(whole, f"{folder}/{kind}-{number}-whole", False)
    steps = len(whole.loader) * EPOCHS
    assert len(whole.rows) == steps, (len(whole.rows), steps)
    for stop in range(1, steps + 1):
        # Each rank has its own: one that is ahead writes to it again.
        place = f"{folder}/{kind}-{number}-{stop}-{os.environ.get('RANK', 0)}"
        first, second = Run(stop), Run(None)
        try:
            train(first, place, False)
        except Stopped:
            pass
        if dist.is_initialized():
            dist.barrier()
        train(second, place, True)
        assert first.rows + second.rows == whole.rows, (kind, number, stop, len(first.rows), len(second.rows), steps)
    seen = list(itertools.chain(*whole.rows))
    print(f"{kind} {number}: {steps} places, {len(seen)} rows")
if dist.is_initialized():
    dist.destroy_process_group()
