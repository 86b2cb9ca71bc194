"""What frameworks have around a DataLoader, around a loader: each hands out the rows of a plain loop, or raises.

    torchrun --nproc-per-node 2 wrappers.py DATA

Prints a line of JSON for each rank: wrapper to "same rows", or the error.
"""

import json
import os
import sys

import torch
from torch.utils.data import DataLoader, DistributedSampler, Subset

import feedline.torch as fl


def opened(data):
    return fl.records(data, record_bytes=8, batch_size=12, device="cpu")


def rows(batches):
    return torch.cat([batch.view(torch.int64)[:, 0] for batch in batches]).tolist()


def of_torch(loader):
    yield "DataLoader(loader)", lambda: DataLoader(loader)
    yield "DataLoader(loader, batch_size=None)", lambda: DataLoader(loader, batch_size=None)
    yield "DataLoader(loader, num_workers=1)", lambda: DataLoader(loader, num_workers=1)
    yield "DataLoader(loader.dataset)", lambda: DataLoader(loader.dataset, batch_size=12)
    yield "DataLoader(loader.dataset, sampler)", lambda: DataLoader(loader.dataset, sampler=loader.sampler)
    yield "DataLoader(Subset)", lambda: DataLoader(Subset(loader.dataset, [0, 1]))
    parts = {"batch_sampler": loader.batch_sampler, "collate_fn": loader.collate_fn}
    yield "DataLoader of its parts", lambda: DataLoader(loader.dataset, **parts)
    yield "DistributedSampler", lambda: DataLoader(loader.dataset, sampler=DistributedSampler(loader.dataset, 2, 0))


def of_torchdata(loader):
    from torchdata.stateful_dataloader import StatefulDataLoader

    yield "StatefulDataLoader", lambda: StatefulDataLoader(loader)


def of_lightning(loader):
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1)
    yield "setup_dataloaders", lambda: fabric.setup_dataloaders(loader)


def of_accelerate(loader):
    from accelerate import Accelerator, data_loader, skip_first_batches

    accelerator = Accelerator(cpu=True)

    def gathered(batches):
        # On one rank the gathered rows are its own, cut at the end by what Accelerate knows of it.
        return batches if accelerator.num_processes > 1 else map(accelerator.gather_for_metrics, batches)

    parts = {"batch_sampler": loader.batch_sampler, "collate_fn": loader.collate_fn}
    prepare = data_loader.prepare_data_loader
    yield "accelerator.prepare", lambda: gathered(accelerator.prepare(loader))
    yield "accelerator.prepare_data_loader", lambda: gathered(accelerator.prepare_data_loader(loader))
    yield "skip_first_batches", lambda: gathered(skip_first_batches(loader, 0))
    yield "data_loader.prepare_data_loader", lambda: gathered(prepare(loader))
    yield "even_batches=False", lambda: gathered(prepare(loader, even_batches=False))
    yield "split_batches", lambda: gathered(prepare(loader, split_batches=True))
    yield "DataLoaderShard", lambda: gathered(data_loader.DataLoaderShard(loader.dataset, **parts))
    if accelerator.process_index == 0:
        # The others wait for this one.
        yield "DataLoaderDispatcher", lambda: gathered(data_loader.DataLoaderDispatcher(loader.dataset, **parts))


def of_transformers(loader):
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments("out", use_cpu=True, report_to=[])
    trainer = Trainer(torch.nn.Linear(1, 1), arguments, train_dataset=loader)
    yield "Trainer(train_dataset=loader)", trainer.get_train_dataloader


def of_ignite(loader):
    import ignite.distributed as idist

    yield "auto_dataloader", lambda: idist.auto_dataloader(loader)


def of_fastai(loader):
    from fastai.data.core import DataLoaders

    yield "DataLoaders", lambda: DataLoaders(loader, loader).train


def of_deepspeed(loader):
    from deepspeed.runtime.dataloader import RepeatingLoader
    from itertools import islice

    yield "RepeatingLoader", lambda: islice(RepeatingLoader(loader), len(loader))


WRAPPERS = [of_torch, of_torchdata, of_lightning, of_accelerate, of_transformers, of_ignite, of_fastai, of_deepspeed]


def main(data):
    if "RANK" in os.environ:
        torch.distributed.init_process_group("gloo")
    expected, said = rows(opened(data)), {}
    for of in WRAPPERS:
        framework = of.__name__[3:]
        try:
            cases = list(of(opened(data)))
        except ImportError:
            continue
        for name, wrap in cases:
            try:
                got = rows(wrap())
                said[f"{framework}: {name}"] = "same rows" if got == expected else f"{len(got)} of {len(expected)} rows"
            except Exception as error:
                said[f"{framework}: {name}"] = f"{type(error).__name__}: {error}"
    print(json.dumps(said))


if __name__ == "__main__":
    main(sys.argv[1])
