"""Ranks under the launchers that give torch.distributed no `RANK`: Lightning's own, and torch.multiprocessing."""

import json
import os
import subprocess
import sys
import textwrap

import numpy as np
import pytest

torch = pytest.importorskip("torch")
COUNT = 16


def run(program, folder):
    """The files that the processes of a program wrote, by name."""
    np.arange(COUNT, dtype=np.float32).tofile(folder / "records.bin")
    (folder / "program.py").write_text(textwrap.dedent(program))
    launchers = ("RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "SLURM_", "OMPI_", "PMI_", "MASTER_")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(launchers)}
    environment |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, folder / "program.py", folder]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}


COMMON = """
    import json, os, sys
    import torch
    import feedline.torch as fl

    folder = sys.argv[1]

    def loader():
        return fl.records(f"{folder}/records.bin", record_bytes=4, batch_size=2, device="cpu")

    def samples(loader):
        return [sample for batch in loader for sample in batch.view(torch.float32).flatten().tolist()]

    def write(name, value):
        with open(f"{folder}/{name}.json", "w") as file:
            json.dump(value, file)

    def refused(loader):
        try:
            iter(loader).__next__()
        except RuntimeError as error:
            return str(error)
"""


def test_lightnings_own_launcher(tmp_path):
    pytest.importorskip("lightning")
    program = COMMON + """
    import lightning

    early = loader()
    variables = {name: os.environ.get(name) for name in ["RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE"]}

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1))

        def train_dataloader(self):
            late = loader()
            write(f"rank{self.global_rank}", {
                "early": early.shard, "late": late.shard, "samples": samples(late), "refused": refused(early), **variables,
            })
            return late

        def training_step(self, batch, _index):
            return (self.weight * batch.view(torch.float32)).sum()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.01)

    lightning.Trainer(
        max_epochs=1, accelerator="cpu", devices=2, strategy="ddp", logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False,
    ).fit(Module())
    """  # fmt: skip
    found = run(program, tmp_path)
    first, second = found["rank0"], found["rank1"]
    assert {name: second[name] for name in ["RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE"]} == {
        "RANK": None, "LOCAL_RANK": "1", "NODE_RANK": "0", "WORLD_SIZE": "2",
    }  # fmt: skip
    assert (second["early"], second["late"], second["refused"]) == ([1, 2], [1, 2], None)
    # The main process has no variables before it starts the others.
    assert (first["early"], first["late"]) == ([0, 1], [0, 2])
    assert "rank 0 of 1, and torch.distributed has rank 0 of 2" in first["refused"]
    assert sorted(first["samples"] + second["samples"]) == list(range(COUNT))


def test_a_spawned_process_needs_torch_distributed_first(tmp_path):
    program = COMMON + """
    import torch.distributed as dist
    import torch.multiprocessing as multiprocessing

    def work(rank):
        early = loader()
        dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
        write(f"rank{rank}", {"refused": refused(early), "samples": samples(loader())})
        dist.destroy_process_group()

    if __name__ == "__main__":
        multiprocessing.spawn(work, nprocs=2)
    """
    found = run(program, tmp_path)
    for rank in range(2):
        assert f"rank 0 of 1, and torch.distributed has rank {rank} of 2" in found[f"rank{rank}"]["refused"]
    assert sorted(found["rank0"]["samples"] + found["rank1"]["samples"]) == list(range(COUNT))
