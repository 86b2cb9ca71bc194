"""The package with PyTorch on a real GPU; skipped without one. test_cuda.py needs none."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("PyTorch sees no GPU", allow_module_level=True)

from feedline import IMAGENET, Loader, to_torch  # noqa: E402

import demo

RECORD = 100_000
COUNT = 300


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    data = np.random.default_rng(1).integers(0, 256, (COUNT, RECORD), dtype=np.uint8)
    path = tmp_path_factory.mktemp("records") / "records.bin"
    data.tofile(path)
    return path, torch.from_numpy(data)


def batches(records, **settings):
    loader = Loader("records", records[0], record_bytes=RECORD, batch_size=20, device="cuda:0", ids=True, **settings)
    return loader, loader.epoch(0)


def test_tensors_lie_on_the_gpu_with_the_bytes_of_the_file(records):
    _, data = records
    _, epoch = batches(records, shuffle=3)
    for batch in map(to_torch, epoch):
        assert batch["record"].device == torch.device("cuda:0") and batch["ids"].device == torch.device("cpu")
        assert torch.equal(batch["record"].cpu(), data[batch["ids"].view(torch.int64)])


def test_late_work_on_the_current_stream_reads_what_the_batch_held(records):
    _, data = records
    busy = torch.rand(4096, 4096, device="cuda:0")
    for stream in [torch.cuda.default_stream(), torch.cuda.Stream()]:
        sums = []
        with torch.cuda.stream(stream):
            _, epoch = batches(records, device_batches=2)
            for batch in map(to_torch, epoch):
                for _ in range(4):
                    busy = (busy @ busy).clamp_(0, 1)
                sums.append(batch["record"].sum(dtype=torch.int64))
                batch["record"].zero_()
        assert torch.stack(sums).sum().item() == data.sum(dtype=torch.int64).item()


def test_work_on_a_stream_that_was_bound_is_waited_for(records):
    _, data = records
    side = torch.cuda.Stream()
    busy = torch.rand(4096, 4096, device="cuda:0")
    sums = []
    _, epoch = batches(records, device_batches=2)
    for batch in epoch:
        batch.bind(side)
        record = torch.from_dlpack(batch["record"])
        with torch.cuda.stream(side):
            for _ in range(4):
                busy = (busy @ busy).clamp_(0, 1)
            sums.append(record.sum(dtype=torch.int64))
        del record, batch
    assert torch.stack(sums).sum().item() == data.sum(dtype=torch.int64).item()


@pytest.mark.parametrize("name", [None, "f32", "f16", "bf16"])
def test_pictures_are_the_same_on_both_devices(tmp_path, name):
    demo.write(tmp_path, per_class=10)
    settings = {"batch_size": 16, "size": 32, "shuffle": 1, "layout": "nchw"}
    if name is not None:
        settings |= {"dtype": name, "normalize": IMAGENET}
    there, here = (Loader("images", tmp_path, device=device, **settings).epoch(0) for device in ["cuda:0", "cpu"])
    for one, other in zip(map(to_torch, there), map(to_torch, here), strict=True):
        for field in ["image", "label"]:
            assert torch.equal(one[field].cpu(), other[field])


def test_the_training_loop_learns_on_the_gpu_and_says_how_fast(tmp_path):
    demo.write(tmp_path, per_class=24)
    settings = ["--data", tmp_path, "--device", "cuda:0", "--epochs", "4", "--batch-size", "16"]
    command = [sys.executable, Path(demo.__file__).with_name("train.py"), *settings]
    run = subprocess.run([str(word) for word in command], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    last = next(line for line in run.stdout.splitlines() if line.startswith("epoch 3: "))
    assert "images/s" in last and float(last.split("batch ")[1].split()[0]) > 0.9
    assert "cuda:0" in run.stdout
