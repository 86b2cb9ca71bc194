"""Evaluate on several ranks, exactly: each sample counts once, though the ranks' batches must be equally large."""

import os
import subprocess
import sys

import torch
import torch.distributed as dist

import feedline.torch as fl
from small_data import pictures

COUNT = 101  # two ranks with batches of 8 have places for 112


def evaluate(data: str) -> None:
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    # "mask" fills up the last batch with rows of zeros; `status` is 0 where a row is a sample.
    loader = fl.images(data, size=32, dtype="f32", batch_size=8, last_batch="mask", ids=True)
    sums = torch.zeros(2, device=loader.device)
    for batch in loader:
        real = (batch["status"] == 0).to(loader.device)
        brightness = batch["image"].mean(dim=(1, 2, 3))  # yours: the loss or the hits of each row
        sums += torch.stack([brightness[real].sum(), real.sum()])
    dist.all_reduce(sums)
    mean, count = (sums[0] / sums[1]).item(), int(sums[1])

    if dist.get_rank() == 0:
        alone = torch.cat([images.mean(dim=(1, 2, 3)) for images, _ in fl.images(data, size=32, dtype="f32", shard=None)])
        print(f"{count} samples, mean {mean:.6f}; on one rank {len(alone)}, {alone.mean():.6f}")
        assert count == len(alone) == COUNT and abs(mean - alone.mean().item()) < 1e-6
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" in os.environ:
        evaluate(sys.argv[1])
    else:  # yours: torchrun --nproc-per-node 8 evaluation.py imagenet/val
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        subprocess.run([*torchrun, __file__, str(pictures(COUNT))], check=True)
