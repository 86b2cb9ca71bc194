"""PyTorch and its frameworks: tensors, states, and whole trainings that are killed and go on.

    pytest python/tests/test_frameworks.py

Frameworks that are not installed are skipped.
"""

import json
import os
import re
import subprocess
import sys
import warnings
import weakref
from pathlib import Path

import numpy as np
import pytest

import feedline
import feedline.numpy

torch = pytest.importorskip("torch")
import feedline.torch as fl  # noqa: E402

COUNT, RECORD, BATCH = 100, 48, 16
BATCHES = 7
HERE = Path(__file__).resolve().parent


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "records.bin"
    np.random.default_rng(1).integers(0, 256, (COUNT, RECORD), dtype=np.uint8).tofile(path)
    return path


def open_torch(path, **settings):
    return fl.records(path, record_bytes=RECORD, batch_size=BATCH, shuffle=5, device="cpu", **settings)


def test_a_batch_is_a_tensor_or_a_dict(data, tmp_path):
    (first, *_) = open_torch(data)
    assert isinstance(first, torch.Tensor) and first.shape == (BATCH, RECORD)
    (first, *_) = open_torch(data, ids=True)
    assert set(first) == {"record", "ids", "status"}
    np.arange(101, dtype=np.uint16).tofile(tmp_path / "tokens.bin")
    loader = fl.tokens(tmp_path / "tokens.bin", seq_len=10, next_token=True, batch_size=2, device="cpu")
    assert all(window.shape == (2, 11) for window in loader)


def test_pictures_have_the_layout_of_the_library(tmp_path):
    import demo

    demo.write(tmp_path, per_class=3)
    loader = fl.images(tmp_path, size=32, batch_size=4, shuffle=42, device="cpu", dtype=torch.float16)
    for images, labels in loader:
        assert images.shape == (4, 3, 32, 32) and images.dtype == torch.float16 and labels.dtype == torch.int64
    arrays = feedline.numpy.images(tmp_path, size=32, batch_size=4, dtype="f32", normalize=feedline.IMAGENET)
    assert next(iter(arrays))["image"].shape == (4, 32, 32, 3)


def test_the_state_survives_torch_save(data, tmp_path):
    loader = open_torch(data)
    next(iter(loader))
    torch.save({"loader": loader.state_dict()}, tmp_path / "run.pt")
    other = open_torch(data)
    other.load_state_dict(torch.load(tmp_path / "run.pt", weights_only=True)["loader"])
    assert len(list(other)) == BATCHES - 1


def test_it_is_a_stateful_object_of_torchdata():
    stateful = pytest.importorskip("torchdata.stateful_dataloader.stateful")
    assert issubclass(fl.Loader, stateful.Stateful) or isinstance(fl.Loader, stateful.Stateful)


def test_a_compiled_step_is_compiled_once(data):
    testing = pytest.importorskip("torch._dynamo.testing")
    counter = testing.CompileCounter()
    step = torch.compile(lambda record: record.float().mean(1), backend=counter)
    for batch in open_torch(data, last_batch="drop"):
        step(batch)
    assert counter.frame_count == 1


# Whole scripts, killed in the middle and resumed: batches equal those of an uninterrupted run.


# Started by torchrun; others start their ranks themselves.
BY_TORCHRUN = ("plain.py", "accelerate_loop.py", "transformers_loop.py", "every_step.py", "mesh.py", "across.py", "wrappers.py")


def run(script, *arguments, ranks=1):
    command = [sys.executable, str(HERE / "loops" / script), *map(str, arguments)]
    if ranks > 1 and script in BY_TORCHRUN:
        command[1:1] = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    elif ranks > 1:
        command += ["--ranks", str(ranks)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment, check=False)


def lines(folder):
    """What each rank saw, in order; a batch that was seen before the kill and not saved is seen again."""
    ranks = {}
    for path in sorted(folder.glob("seen-*")):
        seen = {}
        for line in path.read_text().splitlines():
            epoch, batch, what = line.split()
            assert seen.setdefault((epoch, batch), what) == what
        ranks[path.name] = seen
    return ranks


def expected(data, ranks, **settings):
    """What each rank sees in two epochs without an interruption."""
    seen = {}
    for rank in range(ranks):
        loader = open_torch(data, shard=(rank, ranks), **settings)
        epochs = [(epoch, number, batch) for epoch in range(2) for number, batch in enumerate(loader.epoch(epoch), 1)]
        seen[f"seen-{rank}"] = {(str(epoch), str(number)): str(batch.long().sum().item()) for epoch, number, batch in epochs}
    return seen


@pytest.mark.parametrize(
    "script, ranks, needs, order",
    [
        ("plain.py", 1, "torch", "shuffled"),
        ("plain.py", 2, "torch", "weighted"),
        ("spawn.py", 2, "torch", "shuffled"),
        ("lightning_loop.py", 1, "lightning", "shuffled"),
        ("lightning_loop.py", 2, "lightning", "weighted"),
        ("fabric_loop.py", 2, "lightning", "shuffled"),
        ("accelerate_loop.py", 2, "accelerate", "weighted"),
        ("transformers_loop.py", 2, "transformers", "weighted"),
    ],
)
def test_a_killed_training_goes_on_with_the_same_batches(data, tmp_path, script, ranks, needs, order):
    pytest.importorskip(needs)
    flags, settings = {"shuffled": ((), {}), "weighted": (("--weighted",), {"sample_weights": range(COUNT)})}[order]
    killed = run(script, data, tmp_path, *flags, "--kill-at", 5 if ranks == 1 else 3, ranks=ranks)
    assert killed.returncode != 0 and lines(tmp_path), killed.stdout + killed.stderr
    resumed = run(script, data, tmp_path, *flags, ranks=ranks)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert "resumed" in resumed.stdout
    assert lines(tmp_path) == expected(data, ranks, **settings)


@pytest.mark.parametrize("kind, ranks", [("plain", 1), ("plain", 2), ("accelerate", 2), ("lightning", 1), ("trainer", 1)])
def test_a_training_resumes_behind_every_step(data, tmp_path, kind, ranks):
    pytest.importorskip({"plain": "torch", "trainer": "transformers"}.get(kind, kind))
    data.write_bytes(data.read_bytes()[: 29 * RECORD])
    done = run("every_step.py", kind, data, tmp_path, ranks=ranks)
    assert done.returncode == 0, done.stdout + done.stderr


def test_ranks_of_a_mesh_share_their_data(data, tmp_path):
    np.arange(101, dtype=np.int64).tofile(data)
    done = run("mesh.py", data, ranks=4)
    assert done.returncode == 0 and done.stdout.count("ok") == 4, done.stdout + done.stderr
    assert 'refused: the 4 processes of torch.distributed are a mesh of dp=2, tp=2' in done.stdout


AS_IT_IS = "(?s)TypeError: .*loop over the loader as it is"
#: Wrappers around a loader, and what they must do on one rank and on two; "same rows" by default.
WRAPPED = {
    "torch: DataLoader(loader)": (AS_IT_IS, AS_IT_IS),
    "torch: DataLoader(loader, batch_size=None)": (AS_IT_IS, AS_IT_IS),
    "torch: DataLoader(loader, num_workers=1)": (AS_IT_IS, AS_IT_IS),
    "torch: DataLoader(loader.dataset)": (AS_IT_IS, AS_IT_IS),
    "torch: DataLoader(loader.dataset, sampler)": (AS_IT_IS, AS_IT_IS),
    "torch: DataLoader(Subset)": (AS_IT_IS, AS_IT_IS),
    "torch: DistributedSampler": (AS_IT_IS, AS_IT_IS),
    "torchdata: StatefulDataLoader": (AS_IT_IS, AS_IT_IS),
    "lightning: setup_dataloaders": ("TypeError: Only PyTorch DataLoader", "TypeError: Only PyTorch DataLoader"),
    "accelerate: data_loader.prepare_data_loader": ("same rows", AS_IT_IS),
    "accelerate: even_batches=False": ("same rows", AS_IT_IS),
    "accelerate: split_batches": ("same rows", AS_IT_IS),
    "accelerate: DataLoaderShard": ("same rows", AS_IT_IS),
    "accelerate: DataLoaderDispatcher": ("same rows", AS_IT_IS),
    "transformers: Trainer(train_dataset=loader)": (AS_IT_IS, AS_IT_IS),
    "ignite: auto_dataloader": (AS_IT_IS, AS_IT_IS),
}


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_wrapper_hands_out_the_same_rows_or_raises(data, ranks):
    np.arange(101, dtype=np.int64).tofile(data)
    done = run("wrappers.py", data, ranks=ranks)
    assert done.returncode == 0, done.stdout + done.stderr
    told = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(told) == ranks
    for name, said in (item for one in told for item in one.items()):
        assert re.search(WRAPPED.get(name, ("same rows", "same rows"))[ranks - 1], said), (name, said)


def test_ray_leaves_a_loader_as_it_is(data, monkeypatch):
    utils = pytest.importorskip("ray.train.v2.torch.train_loop_utils")

    class Context:
        """Of the second of two workers, without a cluster."""

        get_world_size, get_world_rank = (lambda _: 2), (lambda _: 1)

    monkeypatch.setattr(utils.ray.train, "get_context", Context)
    monkeypatch.setattr(utils.ray.train.torch, "get_device", lambda: torch.device("cpu"))
    prepared = utils.prepare_data_loader(open_torch(data, shard=(1, 2)))
    for epoch in (1, 0):
        # As in its documentation.
        prepared.sampler.set_epoch(epoch)
        got, expected = torch.cat(list(prepared)), torch.cat(list(open_torch(data, shard=(1, 2)).epoch(epoch)))
        assert torch.equal(got, expected)
    loader = open_torch(data)
    gone = weakref.ref(loader)
    del loader
    assert gone() is None, "its sampler keeps it"


def test_the_view_over_ranks_compares_their_steps(tmp_path):
    done = run("across.py", tmp_path, "nothing", 2, 60, ranks=3)
    assert done.returncode == 0, done.stdout + done.stderr
    for view in map(json.loads, done.stdout.splitlines()):
        # The first batch of an epoch is no step; three ranks have more than 60 batches of it.
        assert view["steps"] == 59 and view["rate"] > 0 and view["text"].count("\n") == 4, view


def test_lightning_has_all_its_stages_and_several_loaders(data, tmp_path):
    pytest.importorskip("lightning")
    data.write_bytes(data.read_bytes()[: 29 * RECORD])
    done = run("stages.py", data, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU, batches lie on it")
def test_batches_on_the_host_beside_a_gpu_are_told(data, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    loader = fl.records(data, record_bytes=RECORD, batch_size=BATCH)
    with pytest.warns(UserWarning, match="batches lie on the host"):
        next(iter(loader))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        next(iter(loader))
        next(iter(open_torch(data)))


def test_a_batch_is_cut_into_micro_batches_without_a_copy(data):
    (batch, *_) = open_torch(data, ids=True)
    parts = list(fl.micro(batch, 3))
    assert [len(part["record"]) for part in parts] == [6, 5, 5]
    assert torch.equal(torch.cat([part["record"] for part in parts]), batch["record"])
    assert parts[1]["record"].untyped_storage().data_ptr() == batch["record"].untyped_storage().data_ptr()
    assert [len(part) for part in fl.micro(batch["record"][:2], 5)] == [1, 1]
    with pytest.raises(ValueError, match="parts 0: give a whole number from 1"):
        next(fl.micro(batch, 0))


def test_batches_are_copied_into_static_tensors(data):
    static = torch.zeros(BATCH, RECORD, dtype=torch.uint8)
    for batch in open_torch(data, last_batch="drop"):
        assert fl.copy_into((static,), (batch,))[0] is static and torch.equal(static, batch)
    with pytest.raises(ValueError, match=r"\[16, 48\], the static tensor is torch.uint8 \[1, 48\]"):
        fl.copy_into(static[:1], batch)


def test_map_batch_has_torch_tensors(data):
    def mapped(batch):
        assert isinstance(batch["record"], torch.Tensor)
        batch["record"].add_(1)
        batch["mean"][:] = batch["record"].float().mean(dim=1)

    got = list(open_torch(data, map_batch=mapped, adds={"mean": (torch.float32, ())}, output="dict"))
    for batch, before in zip(got, open_torch(data), strict=True):
        assert torch.equal(batch["record"], before + 1)
        assert torch.equal(batch["mean"], batch["record"].float().mean(dim=1))


def test_tuples_have_the_order_of_the_columns(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    parts = {"a": torch.arange(20), "b": torch.arange(20).float()}
    safetensors.save_file(parts, tmp_path / "x.safetensors")
    first, second = next(iter(fl.safetensors(tmp_path / "x.safetensors", columns=["b", "a"], device="cpu")))
    assert (first.dtype, second.dtype) == (torch.float32, torch.int64)
    assert set(next(iter(fl.safetensors(tmp_path / "x.safetensors", device="cpu")))) == {"a", "b"}


def test_progress_bars_know_the_length(data):
    tqdm = pytest.importorskip("tqdm")
    bar = tqdm.tqdm(open_torch(data), disable=False, file=open(os.devnull, "w"))
    assert bar.total == BATCHES and len(list(bar)) == BATCHES and bar.n == BATCHES
