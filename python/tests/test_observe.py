"""The profiler around other loaders. What it names for known faults is measured by benches/observe.py."""

import copy
import gc
import json
import os
import pickle
import threading
import warnings
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import eventually

import feedline
import feedline.numpy as fl
from feedline import _gpu, _observe, _trial

torch = pytest.importorskip("torch")
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

ROWS = 60
DATA = TensorDataset(torch.arange(ROWS), torch.zeros(ROWS, 3))


def name_of(thread):
    try:
        return Path(f"/proc/self/task/{thread}/comm").read_text().strip()
    except OSError:  # it has ended
        return ""


def no_sampler_is_left():
    return eventually(lambda: "feedline-look" not in map(name_of, os.listdir("/proc/self/task")))


class Stream(IterableDataset):
    def __iter__(self):
        return iter(torch.arange(8))


def generator():
    yield from ({"a": np.zeros((4, 2))} for _ in range(5))


LOADERS = [
    ("a DataLoader", lambda: DataLoader(DATA, batch_size=8), 8, ROWS),
    ("its worker processes", lambda: DataLoader(DATA, batch_size=8, num_workers=2), 8, ROWS),
    ("a stream", lambda: DataLoader(Stream(), batch_size=4), 2, 8),
    ("a list", lambda: [np.zeros((3, 2)), np.zeros((1, 2))], 2, 4),
    ("a generator", generator, 5, 20),
]


@pytest.mark.parametrize("make, batches, samples", [row[1:] for row in LOADERS], ids=[row[0] for row in LOADERS])
def test_every_batch_comes_and_is_counted(make, batches, samples):
    right = list(make())
    loader = feedline.observe(make())
    got = list(loader)
    assert len(got) == len(right) == batches
    torch.testing.assert_close(got, right)
    loop = loader.snapshot()["loop"]
    assert (loop["epochs"], loop["batches"], loop["samples"]) == (1, batches, samples)
    assert no_sampler_is_left()


def test_attributes_and_length_are_those_of_the_loader():
    inner = DataLoader(DATA, batch_size=8, shuffle=True)
    loader = feedline.observe(inner)
    assert len(loader) == len(inner) and loader.dataset is DATA and loader.sampler is inner.sampler
    with pytest.raises(AttributeError, match="nothing"):
        loader.nothing
    with pytest.raises(TypeError):
        len(feedline.observe(generator()))
    loader.epoch = 7
    assert inner.epoch == loader.epoch == 7
    # Frameworks ask for the class, and deal out a DataLoader to their ranks.
    assert isinstance(loader, DataLoader) and isinstance(loader, feedline.Observed)
    assert not isinstance(feedline.observe([1]), list) and feedline.observe(generator()) and not feedline.observe([])


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda loader: pickle.loads(pickle.dumps(loader))])
def test_a_copy_has_measurements_of_its_own(copied):
    loader = feedline.observe(DataLoader(DATA, batch_size=8))
    list(loader)
    other = copied(loader)
    assert len(list(other)) == 8
    assert [each.snapshot()["loop"]["epochs"] for each in (loader, other)] == [1, 1]


def test_a_stream_longer_than_it_says_gives_no_warning_by_being_observed():
    class Short(Stream):
        def __len__(self):
            return 1

    loader = feedline.observe(DataLoader(Short(), batch_size=4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [len(batch) for batch in loader] == [4, 4]


def test_epochs_add_up_and_a_left_epoch_ends():
    loader = feedline.observe(DataLoader(DATA, batch_size=8, num_workers=1))
    for epoch in range(3):
        for number, _ in enumerate(loader):
            if epoch == 1 and number == 2:
                break
        gc.collect()
        assert no_sampler_is_left()
    loop = loader.snapshot()["loop"]
    assert (loop["epochs"], loop["batches"], loop["steady_batches"]) == (3, 8 + 3 + 8, 7 + 2 + 7)
    assert [worker["number"] for worker in loader.snapshot()["workers"]] in ([0], [])


def test_errors_of_the_loader_pass_through():
    def fails():
        yield 1
        raise KeyError("seven")

    loader = feedline.observe(fails())
    with pytest.raises(KeyError, match="seven"):
        list(loader)
    assert loader.snapshot()["loop"]["batches"] == 1 and no_sampler_is_left()


def test_measuring_ends_with_the_context():
    with feedline.observe(DataLoader(DATA, batch_size=8)) as loader:
        list(loader)
    assert len(list(loader)) == 8
    assert loader.snapshot()["loop"]["epochs"] == 1


def test_no_thread_file_or_child_is_left():
    def left():
        return threading.active_count(), len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))

    list(feedline.observe(DataLoader(DATA, batch_size=8)))
    before = left()
    for _ in range(3):
        list(feedline.observe(DataLoader(DATA, batch_size=8)))
    gc.collect()
    assert eventually(lambda: all(now <= then for now, then in zip(left(), before))), (left(), before)


FACTS = {"workers": 2, "prefetch_factor": 3, "persistent_workers": True, "pin_memory": False, "batch_size": 4, "kind": "torch", "batches": 15}


@pytest.mark.parametrize("around", ["base_dataloader", "_dataloader", "pipeline"])
def test_settings_are_read_from_a_dataloader_also_within_other_loaders(around):
    inner = DataLoader(DATA, batch_size=4, num_workers=2, prefetch_factor=3, persistent_workers=True)
    outer = SimpleNamespace(**{around: [inner] if around == "pipeline" else inner})
    for loader in (inner, outer):
        known = _observe.facts(loader)
        assert {name: known.get(name) for name in FACTS if name != "batches"} == {k: v for k, v in FACTS.items() if k != "batches"}
    assert _observe.facts(inner)["batches"] == 15


@pytest.mark.parametrize(
    "module, name, kind, attributes, workers",
    [
        ("nvidia.dali.plugin", "Iterator", "dali", {"_pipes": [SimpleNamespace(num_threads=3)]}, 3),
        ("tensorflow.python", "Dataset", "tf_data", {}, None),
        ("grain._src", "DataLoader", "grain", {"_multiprocessing_options": SimpleNamespace(num_workers=2)}, 2),
        # It has no `worker_count`.
        ("grain._src", "BatchMapDataset", "other", {}, None),
        ("mine", "DataLoader", "other", {}, None),
    ],
)
def test_loaders_are_known_by_their_package(module, name, kind, attributes, workers):
    loader = type(name, (), {"__module__": module})()
    vars(loader).update(attributes)
    known = _observe.facts(loader)
    assert (known["kind"], known.get("workers")) == (kind, workers)


class Refuses:
    @property
    def shape(self):
        raise RuntimeError("no shape")


class Frame(SimpleNamespace):
    """As of pandas: keys, and values that are no method."""

    keys, values = dict.keys, np.zeros((3, 1))


@pytest.mark.parametrize(
    "batch, size, right",
    [
        ((torch.zeros(7, 3), torch.zeros(7)), 8, 7),
        ({"x": [torch.zeros(5)]}, None, 5),
        ([torch.zeros(3, 32, 32)] * 4, 2, 2),
        (["a", "b", "c"], 4, 3),
        (torch.zeros(()), None, 0),
        (None, None, 0),
        ([], 4, 0),
        # One sample of a stream, not 10 of them.
        ({"x": torch.zeros(10), "label": 3}, None, 0),
        ((torch.zeros(3, 32, 32), torch.zeros(())), None, 0),
        ({"id": 7, "x": torch.zeros(5, 2)}, 8, 5),
        (Frame(shape=(3, 1)), None, 3),
        (Refuses(), None, 0),
        (Refuses(), 4, 4),
    ],
)
def test_samples_of_a_batch(batch, size, right):
    assert _observe.rows(batch, {"batch_size": size}) == right


def test_a_verdict_is_values_and_words():
    loader = feedline.observe(DataLoader(DATA, batch_size=2))
    list(loader)
    verdict = json.loads(json.dumps(loader.verdict()))
    assert verdict["version"] == 1 and {"cause", "also", "rate", "starved_share", "strength", "evidence", "advice", "headline"} <= set(verdict)
    assert loader.report().startswith(verdict["headline"])
    page = loader._repr_html_()
    assert "your loop" in page and verdict["headline"].split(":")[0] in page


@pytest.mark.parametrize(
    "loader, words",
    [
        (lambda path: fl.records(path, record_bytes=8), "measures itself"),
        (lambda path: feedline.observe([1]), "observed already"),
        (lambda path: 3, "int: give an iterable"),
    ],
)
def test_what_cannot_be_observed_is_said(tmp_path, loader, words):
    (tmp_path / "a.bin").write_bytes(bytes(64))
    with pytest.raises(TypeError, match=words):
        feedline.observe(loader(tmp_path / "a.bin"))


class Clock:
    """Events of a GPU whose steps take 3 ms, 1 ms after each other."""

    marks = 0

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self):
        self.at = 4 * (Clock.marks // 2) + 3 * (Clock.marks % 2)
        Clock.marks += 1

    def query(self):
        return True

    def synchronize(self):
        pass

    def elapsed_time(self, later):
        return later.at - self.at


def test_idle_time_of_a_gpu_is_between_steps(monkeypatch):
    steps = _gpu.Steps()
    steps._torch = SimpleNamespace(cuda=SimpleNamespace(is_initialized=lambda: True, Event=Clock))
    monkeypatch.setattr(Clock, "marks", 0)
    for _ in range(2):
        steps.restart()
        for _ in range(5):
            steps.begin()
            steps.end()
        steps.times()
    assert steps.times() == (8, 8 * 4_000_000, 8 * 1_000_000)


def test_nothing_is_marked_without_a_gpu():
    steps = _gpu.Steps()
    steps.begin()
    steps.end()
    assert not steps.used and steps.times() == (0, 0, 0)


def test_data_that_feedline_does_not_read_are_not_tried():
    loader = feedline.observe(DataLoader(DATA, batch_size=8), try_it=True)
    list(loader)
    trial = loader.verdict()["trial"]
    assert trial["rate"] is None and "TensorDataset is no ImageFolder" in trial["text"] and trial["text"] in loader.report()


def test_the_same_pictures_are_tried(tmp_path, monkeypatch):
    import demo

    vision = pytest.importorskip("torchvision")
    v2 = pytest.importorskip("torchvision.transforms.v2")
    monkeypatch.setattr(_trial, "SECONDS", 0.1)
    demo.write(tmp_path, per_class=8)
    crop = v2.Compose([v2.RandomResizedCrop(32), v2.RandomHorizontalFlip(), v2.ToImage(), v2.ToDtype(torch.float32, scale=True)])
    loader = feedline.observe(DataLoader(vision.datasets.ImageFolder(tmp_path, crop), batch_size=4, shuffle=True), try_it=True)
    list(loader)
    trial = loader.verdict()["trial"]
    assert trial["rate"] > 0 and "through feedline" in trial["text"]
    # It is tried once.
    list(loader)
    assert loader.verdict()["trial"] is trial


@pytest.mark.parametrize(
    "transform, right",
    [
        ("RandomResizedCrop(64)", {"size": 64, "augment": True}),
        ("Compose([Resize(72), CenterCrop(64), ToTensor()])", {"size": 64, "augment": False, "dtype": "f32"}),
        ("Resize((40, 60))", {"size": (40, 60), "augment": False}),
        ("Compose([CenterCrop(64), ColorJitter()])", "ColorJitter is none of feedline's"),
        ("CenterCrop((40, 60))", "40 x 60 are not square"),
        ("Resize(72)", "not cropped or resized to one size"),
    ],
)
def test_transforms_become_settings(transform, right):
    transforms = pytest.importorskip("torchvision.transforms")
    made = eval(transform, vars(transforms))
    if isinstance(right, dict):
        assert _trial._picture(made) == right
    else:
        with pytest.raises(_trial.Unknown, match=right):
            _trial._picture(made)


def test_a_lightning_training_is_measured(tmp_path):
    lightning = pytest.importorskip("lightning.pytorch")
    from feedline.lightning import Observe

    class Model(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(3, 1)

        def training_step(self, batch, index):
            return self.layer(batch[1]).sum()

        def validation_step(self, batch, index):
            pass

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    observe = Observe()
    trainer = lightning.Trainer(
        max_epochs=2, callbacks=[observe], logger=False, enable_checkpointing=False, enable_progress_bar=False, accelerator="cpu", val_check_interval=4
    )
    train = DataLoader(DATA, batch_size=8, num_workers=2)
    trainer.fit(Model(), train, DataLoader(DATA, batch_size=8))
    loop = observe.snapshot()["loop"]
    assert (loop["epochs"], loop["batches"], loop["samples"]) == (2, 16, 2 * ROWS)
    assert observe.snapshot()["loader"]["workers"] == 2 and "loader     DataLoader" in observe.report()
    assert no_sampler_is_left()
    for given, right in [([train], ("DataLoader", 8)), ({"a": train, "b": train}, ("2 loaders", None))]:
        observe.on_train_start(SimpleNamespace(train_dataloader=given), None)
        known = observe.snapshot()["loader"]
        assert (known["name"], known["batches"]) == right
    assert pickle.loads(pickle.dumps(observe)).snapshot()["loop"]["epochs"] == 0


def test_a_trainers_training_is_measured(tmp_path):
    transformers = pytest.importorskip("transformers")
    from feedline.transformers import Observe

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(3, 1)

        def forward(self, x):
            return {"loss": self.layer(x).sum()}

    arguments = transformers.TrainingArguments(tmp_path, per_device_train_batch_size=8, num_train_epochs=2, report_to=[], use_cpu=True, save_strategy="no")
    rows = [{"x": torch.zeros(3)} for _ in range(ROWS)]
    trainer = transformers.Trainer(Model(), arguments, train_dataset=rows)
    observe = Observe().add_to(trainer)
    with pytest.raises(RuntimeError, match="nothing is observed yet"):
        observe.report()
    trainer.train()
    loop = observe.observed.snapshot()["loop"]
    assert (loop["epochs"], loop["batches"], loop["samples"]) == (2, 16, 2 * ROWS)
    assert observe.verdict()["cause"]
