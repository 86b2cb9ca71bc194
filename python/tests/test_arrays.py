"""Formats of arrays and records: what NumPy, MosaicML Streaming, TensorFlow, llm.c and Megatron write, through the package."""

import json
import pathlib
import struct

import numpy as np
import pytest

import feedline
import feedline.numpy as fn
from feedline.errors import Error

FIXTURES = pathlib.Path(__file__).parents[2] / "tests" / "fixtures"


def first(loader):
    return next(iter(loader))


def llm_c(path, tokens, magic=20240520, version=1):
    head = np.zeros(256, np.int32)
    head[:3] = magic, version, len(tokens)
    path.write_bytes(head.tobytes() + tokens.tobytes())


def test_llm_c_header_is_recognised_and_checked(tmp_path):
    path, tokens = tmp_path / "train_000001.bin", np.arange(1000, 1064, dtype=np.uint16)
    llm_c(path, tokens)
    assert (first(fn.tokens(path, seq_len=16))["tokens"] == tokens.reshape(4, 16)).all()
    whole = first(fn.tokens(path, seq_len=16, header_bytes=0, batch_size=64))["tokens"]
    assert whole.shape == (36, 16) and whole[0, 0] == 20240520 % 65536
    assert (first(fn.tokens(path, seq_len=16, header_bytes=1024))["tokens"] == tokens.reshape(4, 16)).all()
    llm_c(path, tokens.astype(np.uint32), 20240801, 7)
    with pytest.raises(Error, match='the header says u32 tokens, not u16: set `token="u32"`'):
        first(fn.tokens(path, seq_len=16))
    assert first(fn.tokens(path, seq_len=16, token="u32"))["tokens"].dtype == np.uint32


def test_an_array_is_no_file_of_tokens(tmp_path):
    np.save(tmp_path / "a.npy", np.arange(64, dtype=np.uint16))
    with pytest.raises(Error, match="a NumPy array: read it as source npy; `header_bytes=0` reads"):
        first(fn.tokens(tmp_path / "a.npy", seq_len=16))


def test_numbers_beside_arrays_of_any_length_stay_numbers(tmp_path):
    for k, n in enumerate((3, 5)):
        np.savez(tmp_path / f"{k}.npz", x=np.full((n, 2), k, np.float32), y=np.array([k]), z=np.array(k))
    for columns in (None, ["x", "y", "z"]):
        batch = first(fn.npz(tmp_path, columns=columns, up_to=8))
        assert batch["x"].shape == (2, 8, 2) and batch["x.lens"].tolist() == [3, 5]
        assert batch["y"].tolist() == [[0], [1]] and batch["z"].tolist() == [0, 1]
        assert (batch["x"][1, :5] == 1).all() and (batch["x"][1, 5:] == 0).all()
    batch = first(fn.npz(tmp_path, columns=["z", "x"], flat=10))
    assert batch["x.shape"].tolist() == [[3, 2], [5, 2]] and batch["z"].tolist() == [0, 1]


def test_arrays_of_any_shape_come_flat(tmp_path):
    for k in range(3):
        np.save(tmp_path / f"{k}.npy", np.full((k + 1, 3 - k), k, np.int32))
    batch = first(fn.npy(tmp_path, flat=4))
    assert batch["array.shape"].tolist() == [[1, 3], [2, 2], [3, 1]]
    assert batch["array"].tolist() == [[0, 0, 0, 0], [1, 1, 1, 1], [2, 2, 2, 0]]
    with pytest.raises(Error, match="`flat` accepts arrays of several shapes"):
        first(fn.npy(tmp_path))


def test_text_in_an_archive_is_named(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.zeros(2), names=np.array(["a", "b"]))
    with pytest.raises(Error, match="`names.npy`: text .* is not supported"):
        first(fn.npz(tmp_path))


def test_features_of_any_length_texts_and_missing_ones():
    path = FIXTURES / "tfrecord" / "example.tfrecord"
    right = json.loads((FIXTURES / "tfrecord" / "example.json").read_text())
    columns = ["ids:i64:?", "raw:bytes", "label", "four:f32:4", "nope", "none:f32:2"]
    batch = first(fn.tfrecord(path, columns=columns, up_to=12, missing_zero=True))
    for row, one in enumerate(right):
        n = int(batch["ids.lens"][row])
        assert batch["ids"][row, :n].tolist() == one["ids"] and (batch["ids"][row, n:] == 0).all()
        assert batch["raw"][row].view("<i2").tolist() == one["raw"]
        assert batch["label"][row] == one["label"]
        assert batch["four"][row].view(np.uint32).tolist() == one["four_bits"]
    assert batch["raw.lens"].tolist() == [12] * len(right)
    assert not batch["nope"].any() and batch["none"].shape == (len(right), 2) and not batch["none"].any()


@pytest.mark.parametrize(
    "columns, words",
    [
        (["nope"], "`missing_zero=True` reads it as zeros"),
        (["ids:i64:3"], "`NAME:TYPE:.` accepts any number"),
        (["raw"], "is a bytes list, not an int64 list; read it by `NAME:bytes`"),
        (["four:i64:4"], "is a float list, not an int64 list; read it by `NAME:f32`"),
        (["image/encoded"], "requested as two kinds of list, but has one kind: name it once"),
        (["ids:i64:?"], "up_to, the most values, is missing"),
        (["ids:i64:many"], "NAME:TYPE:COUNT"),
    ],
)
def test_words_about_features(columns, words):
    path, settings = FIXTURES / "tfrecord" / "example.tfrecord", {}
    if columns == ["image/encoded"]:
        settings = {"image": "image/encoded", "size": 8}
    with pytest.raises(Error, match=words):
        first(fn.tfrecord(path, columns=columns, **settings))


def test_streaming_lists_have_their_values():
    right = json.loads((FIXTURES / "mds" / "lists.json").read_text())
    with pytest.raises(Error, match="column `mask`: its arrays may have any shape: give their maximum number of elements by `up_to`"):
        first(fn.mds(FIXTURES / "mds" / "lists"))
    batch = first(fn.mds(FIXTURES / "mds" / "lists", up_to=300))
    assert batch["tokens"].dtype == np.uint32 and batch["tokens"].shape == (5, 300)
    assert batch["tokens.lens"].tolist() == [300, 1, 7, 255, 256] and batch["text.lens"].tolist() == [0, 1, 1, 0, 1]
    for row, one in enumerate(right):
        n = int(batch["tokens.lens"][row])
        assert batch["tokens"][row, :n].tobytes().hex() == one["tokens"] and (batch["tokens"][row, n:] == 0).all()
        assert batch["mask"][row, :n].tobytes().hex() == one["mask"]


def test_streaming_arrays_that_say_their_type_are_declared():
    right = json.loads((FIXTURES / "mds" / "values.json").read_text())
    with pytest.raises(Error, match="column `free`: its arrays may have any shape: give dtype and shape by `raw`"):
        first(fn.mds(FIXTURES / "mds" / "raw", columns=["free"]))
    batch = first(fn.mds(FIXTURES / "mds" / "raw", columns=["free", "shaped"], raw=["free:i16:2x3", "shaped:f32:?"], up_to=300))
    assert batch["free"].shape == (11, 2, 3) and [row.tobytes().hex() for row in batch["free"]] == [one["free"] for one in right]
    assert batch["shaped"][2].tobytes().hex() == right[2]["shaped"]


def test_long_documents_are_cut_where_asked_for():
    path = FIXTURES / "tokens" / "megatron-u16"
    with pytest.raises(Error, match="`cut=True` keeps their first 6"):
        first(fn.megatron(path, documents=6))
    assert first(fn.megatron(path, documents=6, cut=True))["tokens.lens"].tolist() == [5, 6, 0, 6]
    with pytest.raises(Error, match="cut is about documents"):
        first(fn.megatron(path, seq_len=6, cut=True))


def tensors(path, rows):
    head = b'{"x":{"dtype":"I32","shape":[%d],"data_offsets":[0,%d]}}' % (len(rows), 4 * len(rows))
    path.write_bytes(struct.pack("<Q", len(head)) + head + np.array(rows, np.int32).tobytes())


def test_files_of_no_samples_among_others_have_none(tmp_path):
    for k, rows in enumerate(([], [1, 2], [], [3])):
        rows = np.array(rows, np.int32)
        np.save(tmp_path / f"{k}.npy", rows)
        np.savez(tmp_path / f"{k}.npz", x=rows)
        tensors(tmp_path / f"{k}.safetensors", rows)
        rows.tofile(tmp_path / f"{k}.bin")
    loaders = [
        fn.npy(tmp_path / "*.npy", rows=True),
        fn.npz(tmp_path / "*.npz", rows=True),
        fn.safetensors(tmp_path / "*.safetensors"),
        fn.records(tmp_path / "*.bin", record_bytes=4),
        fn.tokens(tmp_path / "*.bin", seq_len=1, token="i32"),
    ]
    for loader in loaders:
        (rows,) = first(loader).values()
        assert rows.view(np.int32).ravel().tolist() == [1, 2, 3]


def test_bf16_in_numpy_says_where_to_take_it(tmp_path):
    head = b'{"x":{"dtype":"BF16","shape":[2,2],"data_offsets":[0,8]},"y":{"dtype":"F8_E4M3","shape":[2],"data_offsets":[8,10]}}'
    (tmp_path / "a.safetensors").write_bytes(struct.pack("<Q", len(head)) + head + bytes(range(10)))
    with pytest.raises(BufferError, match="NumPy has no bf16; read it by feedline.torch or feedline.jax"):
        first(fn.safetensors(tmp_path / "a.safetensors"))
    assert first(fn.safetensors(tmp_path / "a.safetensors", columns=["y"]))["y"].tolist() == [8, 9]
    with pytest.raises(BufferError, match="NumPy has no bf16"):
        feedline._tensors.to_numpy(first(feedline.Loader("safetensors", tmp_path / "a.safetensors", device="cpu")))
