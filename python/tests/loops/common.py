"""What the training scripts of the tests share: arguments, the loader, and a log of the batches."""

import argparse
import atexit
import os
import signal

import torch
import torch.distributed as dist

import feedline.torch as fl

parser = argparse.ArgumentParser()
parser.add_argument("data")
parser.add_argument("folder")
parser.add_argument("--kill-at", type=int, default=-1)
parser.add_argument("--ranks", type=int, default=1)
parser.add_argument("--weighted", action="store_true")
arguments = parser.parse_args()
folder = arguments.folder


def records(**settings):
    settings = {"shuffle": 5, **settings}
    if arguments.weighted and settings["shuffle"] is not None:
        settings["sample_weights"] = range(100)
    return fl.records(arguments.data, record_bytes=48, batch_size=16, device="cpu", **settings)


@atexit.register
def end():
    """Without this, a thread of gloo may abort the process at its end: pytorch/pytorch#190489."""
    if dist.is_initialized():
        dist.destroy_process_group()


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(48, 1)

    def forward(self, record):
        return self.layer(record.float() / 255).square().mean()


seen = 0


def log(loader, record):
    """Writes what a batch is; kills the process at the wanted one."""
    global seen
    state = loader.state_dict()
    rank = dist.get_rank() if dist.is_initialized() else 0
    with open(f"{folder}/seen-{rank}", "a") as file:
        file.write(f"{state['epoch']} {state['batch']} {record.long().sum().item()}\n")
    seen += 1
    if seen == arguments.kill_at:
        os.kill(os.getpid(), signal.SIGKILL)
