"""Booleans are booleans in every library: a mask selects rows, and does not index them.

The other side is what wrote or read the file: numpy.load, safetensors, pyarrow, torch's own DataLoader.
"""

import gc

import numpy as np
import pytest

import feedline
import feedline.numpy as fl
from feedline import Loader

COUNT = 20
RNG = np.random.default_rng(5)
MASK = RNG.integers(0, 2, (COUNT, 6)).astype(bool)
DATA = RNG.integers(0, 100, (COUNT, 6), dtype=np.int64)


def joined(loader, name):
    """A field of an epoch, as one array."""
    return np.concatenate([np.asarray(batch[name]) for batch in loader.epoch(0)])


def same(array, other=MASK):
    assert (array.dtype, other.dtype) == (np.dtype(bool), np.dtype(bool)) and np.array_equal(array, other)


# Files


def test_npy_is_what_numpy_loads(tmp_path):
    np.save(tmp_path / "mask.npy", MASK)
    same(joined(fl.npy(tmp_path / "mask.npy", rows=True, batch_size=3), "array"), np.load(tmp_path / "mask.npy"))
    np.save(tmp_path / "bytes.npy", MASK.view(np.uint8))
    loader = fl.npy(tmp_path / "bytes.npy", rows=True, batch_size=3)
    assert joined(loader, "array").dtype == np.uint8, "bytes stay bytes"


def test_npz_is_what_numpy_loads(tmp_path):
    np.savez(tmp_path / "both.npz", mask=MASK, data=DATA)
    loader = fl.npz(tmp_path / "both.npz", rows=True, columns=["mask", "data"], batch_size=3)
    same(joined(loader, "mask"))
    for batch, start in zip(loader.epoch(1), range(0, COUNT, 3), strict=True):
        rows = slice(start, start + 3)
        assert np.array_equal(batch["data"][batch["mask"]], DATA[rows][MASK[rows]]), "it selects"


def test_safetensors_is_what_its_library_loads(tmp_path):
    library = pytest.importorskip("safetensors.numpy")
    library.save_file({"mask": MASK, "data": DATA}, tmp_path / "x.safetensors")
    loader = fl.safetensors(tmp_path / "x.safetensors", batch_size=7, shuffle=1)
    found = np.concatenate([batch["data"][batch["mask"]] for batch in loader])
    other = library.load_file(tmp_path / "x.safetensors")
    assert sorted(found) == sorted(other["data"][other["mask"]])


def test_parquet_is_what_pyarrow_reads(tmp_path):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.table({"one": MASK[:, 0], "data": DATA[:, 0]}), tmp_path / "x.parquet")
    loader = fl.parquet(tmp_path / "x.parquet", columns=["one", "data"], batch_size=7)
    same(joined(loader, "one"), parquet.read_table(tmp_path / "x.parquet")["one"].to_numpy())


# Python code


def test_a_dataset_gives_what_torchs_loader_gives():
    torch = pytest.importorskip("torch")
    import feedline.torch as ft

    class Masked(torch.utils.data.Dataset):
        def __len__(self):
            return COUNT

        def __getitem__(self, index):
            return {"x": torch.tensor(DATA[index]), "mask": torch.tensor(MASK[index]), "first": bool(MASK[index, 0])}

    with pytest.warns(feedline.PythonCostWarning):
        ours = list(ft.dataset(Masked(), batch_size=6))
    theirs = list(torch.utils.data.DataLoader(Masked(), batch_size=6))
    for batch, other in zip(ours, theirs, strict=True):
        assert {name: tensor.dtype for name, tensor in batch.items()} == {name: tensor.dtype for name, tensor in other.items()}
        assert all(torch.equal(batch[name], other[name]) for name in other)
        assert torch.equal(batch["x"][batch["mask"]], other["x"][other["mask"]])
        assert batch["x"][batch["first"]].shape == other["x"][other["first"]].shape


@pytest.mark.parametrize("dtype", ["bool", bool, np.bool_, np.dtype(bool)])
def test_map_batch_adds_a_mask(tmp_path, dtype):
    np.save(tmp_path / "data.npy", DATA)

    def mapped(batch):
        assert batch["even"].dtype == bool
        batch["even"] = batch["array"] % 2 == 0

    loader = fl.npy(tmp_path / "data.npy", rows=True, batch_size=6, map_batch=mapped, adds={"even": (dtype, (6,))})
    assert dict((name, kind) for name, kind, _ in loader.spec())["even"] == "bool"
    for batch in loader:
        assert np.array_equal(batch["array"][batch["even"]], batch["array"][batch["array"] % 2 == 0])


def test_map_batch_adds_a_mask_of_torch(tmp_path):
    torch = pytest.importorskip("torch")
    import feedline.torch as ft

    np.save(tmp_path / "data.npy", DATA)

    def mapped(batch):
        batch["even"] = batch["array"] % 2 == 0

    settings = {"rows": True, "batch_size": 6, "output": "dict", "map_batch": mapped, "adds": {"even": (torch.bool, (6,))}}
    for batch in ft.npy(tmp_path / "data.npy", **settings):
        assert batch["even"].dtype == torch.bool and batch["even"].data_ptr() % 256 == 0
        assert torch.equal(batch["array"][batch["even"]], batch["array"][batch["array"] % 2 == 0])


def test_a_decoder_gives_booleans(tmp_path):
    (tmp_path / "records.bin").write_bytes(MASK.tobytes())

    def high(data, _seed):
        return np.frombuffer(data, np.uint8) > 0

    settings = {"record_bytes": 6, "batch_size": 6, "decoders": {"record": (high, bool, (6,))}}
    with pytest.warns(feedline.PythonCostWarning):
        loader = fl.records(tmp_path / "records.bin", **settings)
    same(joined(loader, "record"))


def test_a_blank_row_is_false(tmp_path):
    np.save(tmp_path / "mask.npy", np.ones((4, 2), bool))
    (batch,) = fl.npy(tmp_path / "mask.npy", rows=True, batch_size=6, last_batch="mask", ids=True)
    same(batch["array"], np.arange(6)[:, None] < np.full((1, 2), 4))


def test_a_token_is_no_boolean(tmp_path):
    (tmp_path / "tokens.bin").write_bytes(bytes(64))
    with pytest.raises(feedline.errors.ConfigError if hasattr(feedline.errors, "ConfigError") else ValueError, match="not bool"):
        Loader("tokens", tmp_path / "tokens.bin", token="bool", seq_len=4)


# Arrays that may be written to


@pytest.mark.parametrize("take", ["feedline.numpy", "to_numpy"])
def test_arrays_are_writable_in_every_version_of_numpy(tmp_path, take):
    data = RNG.integers(0, 256, (40, 64), dtype=np.uint8)
    (tmp_path / "records.bin").write_bytes(data.tobytes())
    settings = {"record_bytes": 64, "batch_size": 10, "ids": True, "slots": 3, "device": "cpu"}
    if take == "to_numpy":
        loader = Loader("records", tmp_path / "records.bin", **settings)
        batches = (feedline.to_numpy(batch) for batch in loader.epoch(0))
    else:
        batches = iter(fl.records(tmp_path / "records.bin", **settings).epoch(0))
    kept = []
    for index, batch in enumerate(batches):
        rows = data[index * 10 :][:10]
        assert all(array.flags.writeable for array in batch.values())
        batch["record"][:, 0] = index
        batch["record"] += 1
        expected = rows.copy()
        expected[:, 0] = index
        assert np.array_equal(batch["record"], expected + 1)
        if not kept:
            # Part of one array, and nothing else, keeps the batch: its memory is not used again.
            kept.append((batch["record"][3:5, ::2], expected[3:5, ::2] + 1))
        del batch
        gc.collect()
    view, expected = kept.pop()
    assert index == 3 and np.array_equal(view, expected)


def test_the_last_view_gives_the_memory_back(tmp_path):
    (tmp_path / "records.bin").write_bytes(bytes(640))
    settings = {"record_bytes": 64, "batch_size": 1, "slots": 2, "workers": 1, "device": "cpu"}
    addresses = set()
    views = []
    for batch in fl.records(tmp_path / "records.bin", **settings).epoch(0):
        addresses.add(batch["record"].ctypes.data)
        views[:] = [batch["record"][0][1:]]
    assert len(addresses) < 10, "every batch had memory of its own"
