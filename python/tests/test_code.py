"""Python functions in the pipeline: map_batch, decoders, datasets."""

import gc
import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import pytest

import feedline
import feedline.numpy as fl
from feedline import errors

COUNT, RECORD, BATCH = 50, 48, 8


@pytest.fixture
def path(tmp_path):
    np.random.default_rng(1).integers(0, 256, (COUNT, RECORD), dtype=np.uint8).tofile(tmp_path / "records.bin")
    return tmp_path / "records.bin"


def loader(path, **settings):
    return fl.records(path, record_bytes=RECORD, batch_size=BATCH, shuffle=3, **settings)


class Squares:
    """A map-style dataset."""

    def __init__(self, count=COUNT):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return {"square": np.array([index, index**2], dtype=np.float32), "index": index}


def squares(dataset=None, **settings):
    with pytest.warns(feedline.PythonCostWarning, match="each sample is made by Python code"):
        return fl.dataset(dataset or Squares(), batch_size=BATCH, **settings)


# map_batch


@pytest.mark.parametrize("workers", [1, 3])
def test_map_batch_changes_every_batch_in_place(path, workers):
    def mapped(batch):
        batch["record"] += 1
        batch["sum"][:] = batch["record"].sum(axis=1, dtype=np.int64)

    plain = list(loader(path))
    got = list(loader(path, workers=workers, map_batch=mapped, adds={"sum": ("i64", ())}))
    assert len(got) == len(plain) == 7
    for batch, before in zip(got, plain, strict=True):
        assert np.array_equal(batch["record"], before["record"] + np.uint8(1))
        assert np.array_equal(batch["sum"], batch["record"].astype(np.int64).sum(axis=1))


def test_map_batch_assigns_fields(path):
    def mapped(batch):
        batch["record"] = batch["record"][:, ::-1]

    for batch, before in zip(loader(path, map_batch=mapped), loader(path), strict=True):
        assert np.array_equal(batch["record"], before["record"][:, ::-1])


def test_draws_of_map_batch_depend_on_seed_epoch_and_batch_alone(path):
    def seeds(workers, **settings):
        seen = {}
        one = loader(path, workers=workers, map_batch=lambda b: seen.__setitem__((b.epoch, b.batch), (b.seed, b.valid)), **settings)
        for _ in range(2):
            list(one)
        return seen

    first = seeds(1)
    assert first == seeds(3) != seeds(1, seed=9)
    assert len({seed for seed, _ in first.values()}) == len(first) == 14
    assert first[0, 6][1] == COUNT % BATCH


def test_an_exception_of_map_batch_is_the_cause_of_the_error(path):
    def mapped(batch):
        array = batch["record"]
        raise ZeroDivisionError(f"no {array.shape}")

    one = loader(path, map_batch=mapped)
    with pytest.raises(errors.UserCodeError, match=r"ZeroDivisionError: no \(8, 48\)") as error:
        next(iter(one))
    assert isinstance(error.value.__cause__, ZeroDivisionError)
    assert "mapped" in [frame.name for frame in error.traceback] or error.value.__cause__.__traceback__ is not None


@pytest.mark.parametrize(
    "function, words",
    [
        (lambda batch: batch, "return None"),
        (lambda batch: batch.update(other=1), "declare it by `adds`"),
        (lambda batch: batch.update(record=np.zeros((1, 2), np.uint8)), r"assigned uint8 \[1, 2\] to 'record'"),
        (lambda batch: batch.update(record=np.zeros((8, 48))), "assigned float64"),
    ],
)
def test_misuse_of_map_batch_is_named(path, function, words):
    with pytest.raises(errors.UserCodeError, match=words):
        next(iter(loader(path, map_batch=function)))


@pytest.mark.parametrize(
    "settings, error, words",
    [
        ({"map_batch": 3}, TypeError, "give a function"),
        ({"map_batch": print, "adds": {"x": ("f32", 3)}}, ValueError, r"'x' is 3: give a tuple"),
        ({"map_batch": print, "adds": {"x": ("f32", (-1,))}}, ValueError, r"'x' is \(-1,\)"),
        ({"map_batch": print, "adds": {"record": ("f32", (1,))}}, ValueError, "two fields are called `record`"),
        ({"adds": {"x": ("f32", (1,))}}, ValueError, "say map_batch, too"),
    ],
)
def test_settings_of_functions_are_checked(path, settings, error, words):
    with pytest.raises(error, match=words):
        loader(path, **settings)


def test_an_array_that_map_batch_keeps_is_an_error_and_no_danger(path):
    kept = []
    one = loader(path, map_batch=lambda batch: kept.append(batch["record"]))
    with pytest.raises(errors.UserCodeError, match="kept an array"):
        list(one)
    del one
    gc.collect()
    assert kept[0].shape == (BATCH, RECORD) and kept[0].sum() >= 0


def test_a_loader_that_is_dropped_does_not_wait_for_its_own_map_batch(path):
    def mapped(batch):
        time.sleep(0.01)

    for _ in range(5):
        one = iter(loader(path, map_batch=mapped, workers=2))
        next(one)
        del one
        gc.collect()


def test_the_interpreter_ends_while_map_batch_runs(path):
    program = f"""
        import time, feedline.numpy as fl
        def mapped(batch): time.sleep(0.05)
        loader = fl.records({str(path)!r}, record_bytes={RECORD}, batch_size=1, map_batch=mapped, workers=3)
        epoch = iter(loader)
        next(epoch)
        print("ends")
    """
    for _ in range(3):
        ended = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=60)
        assert (ended.returncode, ended.stdout, ended.stderr) == (0, "ends\n", "")


# Decoders


def tar(tmp_path):
    import tarfile
    from io import BytesIO

    with tarfile.open(tmp_path / "a.tar", "w") as file:
        for number in range(20):
            for name, data in [(f"{number:03}.txt", f"{number} {number * 2}".encode()), (f"{number:03}.cls", str(number).encode())]:
                member = tarfile.TarInfo(name)
                member.size = len(data)
                file.addfile(member, BytesIO(data))
    return tmp_path / "a.tar"


def test_a_decoder_turns_bytes_into_rows(tmp_path):
    def numbers(data, seed):
        assert isinstance(data, bytes) and isinstance(seed, int)
        return [float(word) for word in data.split()]

    settings = {"columns": ["txt", "cls"], "batch_size": 6}
    with pytest.warns(feedline.PythonCostWarning, match="holds the GIL"):
        one = fl.webdataset(tar(tmp_path), decoders={"txt": (numbers, "f32", (2,))}, **settings)
    rows = np.concatenate([batch["txt"] for batch in one])
    assert rows.dtype == np.float32 and np.array_equal(rows, [[n, 2 * n] for n in range(20)])
    with pytest.warns(feedline.PythonCostWarning):
        ragged = fl.webdataset(tmp_path / "a.tar", decoders={"txt": (lambda d, s: list(d), "u8", 10)}, **settings)
    assert next(iter(ragged))["txt.lens"].tolist() == [3] * 5 + [4]


def test_batches_of_similar_length_have_their_own_shape(tmp_path):
    lengths = [len(f"{n} {2 * n}") for n in range(20)]
    decoders = {"txt": (lambda data, seed: list(data), "u8", 10)}
    settings = {"columns": ["txt", "cls"], "decoders": decoders, "shuffle": 3, "ids": True, "lengths": lengths}

    def trimmed(batch):
        assert batch["txt"].shape[0] == len(batch["label"])
        assert batch["txt"].shape[1] == max(lengths[int(label)] for label in batch["label"])

    with pytest.warns(feedline.PythonCostWarning):
        loader = fl.webdataset(tar(tmp_path), bounds=[3, 4, 5], budget=20, trim=["txt"], map_batch=trimmed, **settings)
    shapes, ids = [], []
    for batch in loader:
        shapes.append(batch["txt"].shape)
        ids += batch["ids"].tolist()
        for row, id in zip(batch["txt"], batch["ids"].tolist()):
            assert bytes(row).rstrip(b"\0") == f"{id} {2 * id}".encode()
    # The five of the first group fill no batch of six, so they go with the next one. The short batch comes last.
    assert sorted(shapes[:-1]) == [(4, 5), (4, 5), (5, 4), (5, 4)] and shapes[-1] == (2, 5)
    assert sorted(ids) == list(range(20)) and len(loader) == 5
    for wrong, words in [
        ({"bounds": [3, 4]}, "the sample has length 5, but the last bound of the groups is 4"),
        ({"bounds": 2, "batch_size": 4, "budget": 20}, "`batch_size` is set, but the groups"),
        ({"indices": [1]}, "lengths are not for a mix or indices"),
    ]:
        with pytest.warns(feedline.PythonCostWarning), pytest.raises(errors.ConfigError, match=words):
            next(iter(fl.webdataset(tmp_path / "a.tar", **settings, **wrong)))
    with pytest.raises(ValueError, match="say lengths, or sizes of patches, too"):
        fl.records(tmp_path / "a.tar", record_bytes=1, budget=3)


def test_a_wrong_decoder_is_named(tmp_path):
    path, columns = tar(tmp_path), ["txt", "cls"]
    with pytest.warns(feedline.PythonCostWarning), pytest.raises(errors.ConfigError, match='no field "json"; it has txt, label'):
        fl.webdataset(path, columns=columns, decoders={"json": (len, "f32", (2,))})
    with pytest.warns(feedline.PythonCostWarning):
        one = fl.webdataset(path, columns=columns, decoders={"txt": (lambda d, s: [1.0], "f32", (2,))})
    with pytest.raises(errors.UserCodeError, match=r"'txt' gave the shape \(1,\); declared is \(2,\).*sample"):
        list(one)


# Datasets


def test_a_dataset_in_python_is_shuffled_batched_and_resumed(path):
    one = squares(shuffle=5)
    batches = list(one)
    index = np.concatenate([batch["index"] for batch in batches])
    assert sorted(index) == list(range(COUNT)) and list(index) != list(range(COUNT))
    assert np.array_equal(np.concatenate([batch["square"] for batch in batches])[:, 1], (index**2).astype(np.float32))
    one.set_epoch(0)
    for number, _ in enumerate(one):
        if number == 2:
            break
    other = squares(shuffle=5, workers=1)
    other.load_state_dict(one.state_dict())
    assert [batch["index"].tolist() for batch in other] == [batch["index"].tolist() for batch in batches[3:]]


def test_samples_of_a_dataset_must_be_alike():
    class Changing(Squares):
        def __getitem__(self, index):
            return np.zeros(3 if index == 40 else 2)

    with pytest.raises(errors.UserCodeError, match=r"'0' of sample 40 is float64 \[3\]; of sample 0 float64 \[2\]"):
        list(squares(Changing()))
    class Words(Squares):
        def __getitem__(self, index):
            return "word"

    with pytest.raises(TypeError, match="samples are numbers, arrays and tensors"):
        fl.dataset(Words())
    with pytest.raises(ValueError, match="has no samples"):
        fl.dataset(Squares(0))


def test_numbers_of_samples_keep_their_values():
    class Odd(Squares):
        def __getitem__(self, index):
            return {"big": np.array([1, index], ">i4"), "turned": np.arange(6).reshape(2, 3).T[::-1], "even": index % 2 == 0}

    first = next(iter(squares(Odd())))
    assert first["big"].dtype == np.int32 and first["big"][3].tolist() == [1, 3]
    assert first["turned"][0].tolist() == [[2, 5], [1, 4], [0, 3]] and first["even"].tolist() == [1, 0] * 4


def test_an_exception_of_a_dataset_names_the_sample_and_can_be_substituted():
    class Broken(Squares):
        def __getitem__(self, index):
            if index == 11:
                raise OSError("disk on fire")
            return super().__getitem__(index)

    with pytest.raises(errors.UserCodeError, match="OSError: disk on fire: sample=11") as error:
        list(squares(Broken()))
    assert isinstance(error.value.__cause__, OSError)
    one = squares(Broken(), substitute=1)
    assert sum(len(batch["index"]) for batch in one) == COUNT
    assert [bad["sample"] for bad in one.bad_samples()] == [11]


def test_functions_run_beside_other_threads():
    count, stop = [0], threading.Event()

    def spin():
        while not stop.is_set():
            count[0] += 1

    class Slow(Squares):
        def __getitem__(self, index):
            time.sleep(0.002)
            return super().__getitem__(index)

    thread = threading.Thread(target=spin)
    thread.start()
    assert len(list(squares(Slow(), workers=4))) == 7
    stop.set()
    thread.join()
    assert count[0] > 0
