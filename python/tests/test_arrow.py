"""Arrow data: rows equal to those of Hugging Face's `datasets`, in folders and caches of it, and in files of other writers."""

import io
import json

import numpy as np
import pytest

import feedline.numpy as fn
from feedline.errors import ConfigError, Error

pa = pytest.importorskip("pyarrow")

COUNT = 700
ANY = {"ids": 9, "text": 40, "big": 5, "flags": 12, "raw": 24, "answer.text": 12}
COLUMNS = ["label", "x", "ids", "text", "big", "flag", "flags", "raw", "half", "answer.text", "answer.start", "pairs:i16:2x2"]
CPU = {"device": "cpu", "shard": None, "batch_size": 32}
SETTINGS = {"columns": COLUMNS, "up_to": ANY, **CPU}


def sample(k):
    return {
        "label": k % 3,
        "x": [k, k + 0.5, -1.0],
        "ids": [k * 7919 % 50257 + n for n in range(k % 9)],
        "text": "é中😀 text"[: k % 9] + str(k),
        "big": [k] * (k % 5),
        "flag": k % 3 == 0,
        "flags": [n % 2 == k % 2 for n in range(k % 12)],
        "raw": bytes([k % 256]) * (k % 24),
        "half": k / 4,
        "answer": {"text": f"answer {k}", "start": k},
        "pairs": [[k, -1], [2, 3]],
    }


def value(row, name):
    name = name.split(":")[0]
    for part in name.split("."):
        row = row[part]
    return row.encode() if isinstance(row, str) else row


def same(loader, rows):
    """Whether the batches are these rows, in this order."""
    seen = 0
    for batch in loader:
        for k in range(len(batch["label"])):
            for name in COLUMNS:
                field = name.split(":")[0]
                found = batch[field][k]
                if (lens := batch.get(field + ".lens")) is not None:
                    assert not found[int(lens[k]) :].any()
                    found = found[: int(lens[k])]
                expected = value(rows[seen + k], name)
                if isinstance(expected, bytes):
                    assert found.tobytes() == expected
                else:
                    np.testing.assert_array_equal(found, np.asarray(expected, found.dtype))
        seen += len(batch["label"])
    return seen == len(rows)


@pytest.fixture(scope="module")
def hugging():
    """The library, and a data set in memory."""
    datasets = pytest.importorskip("datasets")
    from datasets import ClassLabel, Features, LargeList, List, Value

    of = {"label": ClassLabel(names=["a", "b", "c"]), "x": List(Value("float32"), length=3), "ids": List(Value("int32"))}
    of |= {"text": Value("string"), "big": LargeList(Value("int64")), "flag": Value("bool"), "flags": List(Value("bool"))}
    of |= {"raw": Value("large_binary"), "half": Value("float16"), "answer": {"text": Value("string"), "start": Value("int32")}}
    features = Features({**of, "pairs": List(List(Value("int16")))})
    return datasets, datasets.Dataset.from_list([sample(k) for k in range(COUNT)], features=features)


def cached(data, path):
    """The library's own cache files of a table in several parts."""
    again = data.map(lambda row: row, cache_file_name=str(path / "cache-1.arrow"), writer_batch_size=50, num_proc=2)
    return [file["filename"] for file in again.cache_files]


def test_saved_data_sets_and_caches_are_equal_to_datasets(hugging, tmp_path):
    datasets, data = hugging
    ways = {
        "shards": data,
        "chosen": data.select(range(13, 600)).shuffle(seed=1).select([5, 3, 3, 99]),
        "sorted": data.sort("label", reverse=True),
        "slice": data.select(range(101, 300)),
        "joined": datasets.concatenate_datasets([data.select(range(9)), data.select(range(300, 310))]),
    }
    for name, own in ways.items():
        own.save_to_disk(tmp_path / name, num_shards=3)
        rows = list(datasets.load_from_disk(tmp_path / name).with_format(None))
        assert same(fn.arrow(tmp_path / name, **SETTINGS), rows), name
    datasets.DatasetDict(train=data, test=ways["slice"]).save_to_disk(tmp_path / "dict")
    with pytest.raises(ConfigError, match="open the folder of one of them: train, test"):
        fn.arrow(tmp_path / "dict", **SETTINGS)
    assert same(fn.arrow(tmp_path / "dict" / "test", **SETTINGS), list(ways["slice"]))
    (tmp_path / "cache").mkdir()
    files = cached(data, tmp_path / "cache")
    assert len(files) == 2 and same(fn.arrow(files, **SETTINGS), list(data))


def test_pictures_and_arrays_of_datasets_need_no_names(hugging, tmp_path):
    datasets, _ = hugging
    image = pytest.importorskip("PIL.Image")
    draw = np.random.default_rng(0)
    pixels = draw.integers(0, 255, (20, 16, 16, 3), dtype=np.uint8)
    grids = draw.random((20, 2, 3), dtype=np.float32)
    of = {"image": datasets.Image(), "grid": datasets.Array2D(shape=(2, 3), dtype="float32"), "label": datasets.Value("int64")}
    rows = [{"image": image.fromarray(pixels[k]), "grid": grids[k], "label": k} for k in range(20)]
    datasets.Dataset.from_list(rows, features=datasets.Features(of)).save_to_disk(tmp_path / "all")
    for batch in fn.arrow(tmp_path / "all", size=(16, 16), shuffle=3, **CPU):
        labels = batch["label"].tolist()
        np.testing.assert_array_equal(batch["image"], pixels[labels])
        np.testing.assert_array_equal(batch["grid"], grids[labels])
    # A picture in a file beside the data is not read.
    path = tmp_path / "picture.png"
    image.fromarray(pixels[0]).save(path)
    outside = datasets.Dataset.from_dict({"image": [str(path)]}, features=datasets.Features({"image": datasets.Image()}))
    outside.with_format("arrow").save_to_disk(tmp_path / "outside")
    buffer = io.BytesIO()
    image.fromarray(pixels[0]).save(buffer, "PNG")
    table = pa.table({"image": [{"bytes": None, "path": str(path)}, {"bytes": buffer.getvalue(), "path": None}]})
    with pa.ipc.new_stream(tmp_path / "paths.arrow", table.schema) as out:
        out.write_table(table)
    with pytest.raises(Error, match=r"row 0: column `image`: null, or a picture that is stored as a path only"):
        list(fn.arrow(tmp_path / "paths.arrow", image="image", size=(16, 16), **CPU))


def schema(string, lists):
    answer = pa.struct([("text", string), ("start", pa.int32())])
    fields = {"label": pa.int64(), "x": pa.list_(pa.float32(), 3), "ids": lists(pa.int32()), "text": string}
    fields |= {"big": lists(pa.int64()), "flag": pa.bool_(), "flags": lists(pa.bool_()), "raw": pa.large_binary()}
    fields |= {"half": pa.float16(), "answer": answer, "pairs": lists(lists(pa.int16()))}
    return pa.schema(list(fields.items()))


def written(path, kind, table):
    options = pa.ipc.IpcWriteOptions(use_legacy_format=kind == "before 0.15", compression="lz4" if kind == "lz4" else None)
    new = pa.ipc.new_file if kind == "file" else pa.ipc.new_stream
    with new(str(path), table.schema, options=options) as out:
        for start, stop in [(0, 1), (1, 1), (1, 300), (300, len(table))]:
            out.write_table(table.slice(start, stop - start))


@pytest.mark.parametrize("kind", ["stream", "file", "before 0.15", "large", "views", "dictionary"])
def test_other_streams_and_files_are_equal_to_pyarrow(kind, tmp_path):
    rows = [sample(k) for k in range(COUNT)]
    string = {"views": pa.string_view(), "large": pa.large_string()}.get(kind, pa.string())
    table = pa.Table.from_pylist(rows, schema(string, pa.large_list if kind == "large" else pa.list_))
    if kind == "dictionary":
        table = table.set_column(3, "text", table["text"].dictionary_encode())
    written(tmp_path / "a.arrow", kind, table)
    loader = fn.arrow(tmp_path / "a.arrow", **SETTINGS)
    assert same(loader, rows)
    # Of the same columns, in another order and with others between them.
    written(tmp_path / "b.arrow", kind, table.select(["text", "raw", *set(table.column_names) - {"text", "raw"}]))
    assert same(fn.arrow(str(tmp_path / "?.arrow"), **SETTINGS), rows + rows)


def test_files_of_polars_are_equal(tmp_path):
    polars = pytest.importorskip("polars")
    rows = [sample(k) for k in range(COUNT)]
    polars.from_arrow(pa.Table.from_pylist(rows, schema(pa.string(), pa.list_))).write_ipc(tmp_path / "a.arrow")
    assert same(fn.arrow(tmp_path / "a.arrow", **SETTINGS), rows)


def test_a_run_shuffles_resumes_and_packs(tmp_path):
    rows = [sample(k) for k in range(COUNT)]
    written(tmp_path / "a.arrow", "stream", pa.Table.from_pylist(rows, schema(pa.string(), pa.list_)))
    settings = {"columns": ["answer.start", "ids"], "up_to": {"ids": 9}, **CPU}
    seen = [int(k) for batch in fn.arrow(tmp_path, shuffle=7, **settings) for k in batch["answer.start"]]
    assert seen != sorted(seen) and sorted(seen) == list(range(COUNT))
    again = fn.arrow(tmp_path, shuffle=7, **settings)
    for _, batch in zip(range(3), again, strict=False):
        pass
    other = fn.arrow(tmp_path, shuffle=7, **settings)
    other.load_state_dict(again.state_dict())
    assert [int(k) for batch in other for k in batch["answer.start"]] == seen[96:]
    packed = {"tokens": 64, "bins": tmp_path / "bins"}
    loader = fn.arrow(tmp_path, columns=["ids"], packed=packed, device="cpu", shard=None, batch_size=4)
    tokens = np.concatenate([batch["ids"].ravel().copy() for batch in loader])
    assert np.sort(tokens[tokens != 0]).tolist() == sorted(token for row in rows for token in row["ids"] if token)
    assert list(fn.arrow(tmp_path, **settings).lengths("ids")) == [len(row["ids"]) for row in rows]


def test_a_null_is_an_error_or_zero(tmp_path):
    columns = {"label": [1, None], "ids": [[1, 2], None], "text": ["a", None], "within": [[1], [None, 2]]}
    table = pa.table(columns)
    with pa.ipc.new_stream(tmp_path / "a.arrow", table.schema) as out:
        out.write_table(table)
    for name in columns:
        settings = {"columns": [name], "up_to": {name: 4} if name != "label" else None, **CPU}
        with pytest.raises(Error, match=rf"row 1: column `{name}`: .*null.*a\.arrow"):
            list(fn.arrow(tmp_path, **settings))
    settings = {"columns": ["label", "ids", "text"], "up_to": {"ids": 4, "text": 4}, "null_zero": True, **CPU}
    (batch,) = fn.arrow(tmp_path, **settings)
    assert batch["label"].tolist() == [1, 0] and batch["ids.lens"].tolist() == [2, 0] and batch["text.lens"].tolist() == [1, 0]


def test_errors_name_the_file_and_what_to_do(tmp_path):
    table = pa.Table.from_pylist([sample(k) for k in range(40)], schema(pa.string(), pa.list_))
    written(tmp_path / "a.arrow", "stream", table)
    whole = (tmp_path / "a.arrow").read_bytes()
    with pytest.raises(ConfigError, match="`ids` .*a list of any length: give the maximum with `up_to`"):
        fn.arrow(tmp_path, columns=["ids"], **CPU)
    with pytest.raises(ConfigError, match=r"a structure|choose one of its parts, as in \"answer.text\""):
        fn.arrow(tmp_path, columns=["answer"], **CPU)
    (tmp_path / "a.arrow").write_bytes(whole[:-8])
    with pytest.raises(Error, match=r"no end mark: a writer that stopped.*a\.arrow"):
        fn.arrow(tmp_path, columns=["label"], **CPU)
    (tmp_path / "a.arrow").write_bytes(whole[:2000])
    with pytest.raises(Error, match=r"the file ends within .*a\.arrow"):
        fn.arrow(tmp_path, columns=["label"], **CPU)
    written(tmp_path / "a.arrow", "lz4", table)
    with pytest.raises(Error, match="buffers compressed with LZ4_FRAME"):
        fn.arrow(tmp_path, columns=["label"], **CPU)
    state = {"_data_files": [{"filename": "a.arrow"}], "_indices_data_files": [{"filename": "indices.arrow"}]}
    (tmp_path / "state.json").write_text(json.dumps(state))
    with pytest.raises(ConfigError, match="a table of indices"):
        fn.arrow(tmp_path, columns=["label"], **CPU)
