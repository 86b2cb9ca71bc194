"""Scalars of a loader in the logs of training programs, written by the real packages and read back."""

from pathlib import Path

import numpy as np
import pytest
import torch

import feedline
import feedline.torch

NAMES = {"seconds", "samples_per_s", "starved_share", "wait_p99_s", "read_bytes_per_s", "from_memory_share", "decode_busy_share", "bad_samples"}
NAMES |= {"epoch_repeated", "epoch_left_out"}
SAMPLES, BATCH = 400, 10


@pytest.fixture
def records(tmp_path):
    path = tmp_path / "records.bin"
    np.arange(SAMPLES * 8, dtype=np.uint8).tofile(path)
    return lambda **settings: feedline.torch.Loader("records", str(path), record_bytes=8, batch_size=BATCH, **settings)


def test_a_log_covers_the_time_since_the_last_one(records):
    loader = records()
    assert loader.log()["feedline/seconds"] == 0
    logs = []
    for _ in loader:
        logs.append(loader.log(prefix=""))
    assert all(set(log) <= NAMES for log in logs) and set().union(*logs) - {"from_memory_share"} == NAMES - {"from_memory_share"}
    assert sum(log["seconds"] * log["samples_per_s"] for log in logs if log["seconds"]) == pytest.approx(SAMPLES)
    for log in logs:
        assert all(0 <= value <= 1 for name, value in log.items() if name.endswith("_share")), log
    loader.log()
    assert loader.log()["feedline/seconds"] == 0, "no time passes between epochs"


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)

    def forward(self, record):
        return {"loss": self.layer(record.float()).mean()}


def read(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Step and value of each scalar in TensorBoard's event files."""
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found: dict[str, list[tuple[int, float]]] = {}
    for file in sorted(folder.rglob("events.out.tfevents.*")):
        events = accumulators.EventAccumulator(str(file)).Reload()
        for name in events.Tags()["scalars"]:
            found.setdefault(name, []).extend((event.step, event.value) for event in events.Scalars(name))
    return found


def check(found, prefix, steps):
    """The usual scalars at these steps, and all samples but those behind the last step."""
    for name in NAMES - {"from_memory_share"}:
        assert [step for step, _ in found.get(prefix + name, [])] == steps, (name, found.keys())
    samples = sum(rate * seconds for (_, rate), (_, seconds) in zip(found[f"{prefix}samples_per_s"], found[f"{prefix}seconds"]))
    # A loader is ahead by the batch that a loop takes in advance.
    assert samples - BATCH * steps[-1] == pytest.approx(0, abs=BATCH * 1.01)


def test_lightning_writes_the_scalars_to_its_loggers(records, tmp_path):
    lightning = pytest.importorskip("lightning")
    from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger

    from feedline.lightning import LoaderLog

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.model = Model()

        def training_step(self, batch, _index):
            return self.model(batch["record"])["loss"]

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.01)

    loggers = [TensorBoardLogger(str(tmp_path / "tensorboard")), CSVLogger(str(tmp_path / "csv"))]
    trainer = lightning.Trainer(
        max_epochs=1, accelerator="cpu", logger=loggers, callbacks=[LoaderLog()], log_every_n_steps=4, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False,
    )  # fmt: skip
    trainer.fit(Module(), records(output="dict"))
    check(read(tmp_path / "tensorboard"), "feedline/", list(range(3, 40, 4)))
    (csv,) = (tmp_path / "csv").rglob("metrics.csv")
    assert "feedline/starved_share" in csv.read_text().splitlines()[0]


def test_the_trainer_of_transformers_writes_the_scalars(records, tmp_path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("tensorboard")
    from feedline.transformers import LoaderLog

    loader = records(output="dict")

    class Run(transformers.Trainer):
        def get_train_dataloader(self):
            return loader

    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path / "run"), num_train_epochs=1, logging_steps=5, save_strategy="no", report_to=["tensorboard"],
        use_cpu=True, disable_tqdm=True, label_names=[],
    )  # fmt: skip
    run = Run(Model(), arguments)
    LoaderLog(loader).add_to(run)
    run.train()
    # The Trainer puts a prefix before all names.
    check(read(tmp_path / "run"), "train/feedline/", list(range(5, 41, 5)))
