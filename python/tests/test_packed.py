"""Rows of whole documents: the same as packing by hand, and the same loss as of single documents."""

import gzip
import io
import json
import re
import struct
import tarfile
from pathlib import Path

import numpy as np
import pytest

import feedline.numpy as fn
from feedline.errors import ChangedError, Error, ShapeError

LONG = 64


@pytest.fixture
def corpus(tmp_path):
    """Megatron's files, and the documents: lengths 0 to 150, token 100 * document + place."""
    lens = np.random.default_rng(3).integers(0, 60, 200)
    lens[:9] = 150, 64, 65, 128, 1, 63, 129, 0, 2
    documents = [(100 * number + np.arange(length)).astype(np.int32) for number, length in enumerate(lens)]
    tokens = np.concatenate(documents)
    starts = np.concatenate([[0], np.cumsum(4 * lens)[:-1]])
    head = b"MMIDIDX\0\0" + np.uint64(1).tobytes() + b"\4" + np.uint64(len(lens)).tobytes() + np.uint64(len(lens) + 1).tobytes()
    index = lens.astype(np.int32).tobytes() + starts.astype(np.int64).tobytes() + np.arange(len(lens) + 1, dtype=np.int64).tobytes()
    (tmp_path / "corpus.idx").write_bytes(head + index)
    (tmp_path / "corpus.bin").write_bytes(tokens.tobytes())
    return tmp_path / "corpus", documents


def batches(corpus, package=fn, **settings):
    own = {"tokens": LONG, "bins": corpus.with_suffix(".bins"), "longer": "split", "padding": 7} | settings
    return package.megatron(corpus, documents=1000, packed=own, batch_size=5, shard=None, device="cpu")


def pieces(documents):
    return [document[at : at + LONG] for document in documents for at in range(0, len(document), LONG)]


@pytest.mark.parametrize("kept", [False, True])
def test_rows_unpack_to_the_documents(corpus, kept):
    path, documents = corpus
    rows = {"rows": path.with_suffix(".rows")} if kept else {}
    found, filled = [], 0
    for batch in batches(path, key=5, **rows):
        for tokens, positions, numbers, ends, longest in zip(
            *(np.asarray(batch[name]) for name in ("tokens", "positions", "documents", "cu_seqlens", "max_seqlen"))
        ):
            own = [tokens[start:end].copy() for start, end in zip(ends, ends[1:]) if end > start]
            found += own
            # The naive packing of these documents.
            lens = [len(document) for document in own]
            padding = LONG - sum(lens)
            assert (tokens == np.concatenate([*own, np.full(padding, 7)])).all()
            assert (positions == np.concatenate([*map(np.arange, lens), np.zeros(padding)])).all()
            assert (numbers == np.concatenate([np.repeat(np.arange(len(lens)), lens), np.full(padding, -1)])).all()
            assert longest == max(lens) and (np.diff(ends)[len(lens) :] == 0).all()
            filled += sum(lens)
    right = pieces(documents)
    assert sorted(map(tuple, found)) == sorted(map(tuple, right))
    assert filled == sum(map(len, right))
    if kept:
        assert len(np.fromfile(path.with_suffix(".rows"), np.int32)) == 4 + LONG * batches(path, key=5).samples_per_epoch


def test_packed_documents_have_the_loss_of_single_ones(corpus):
    torch = pytest.importorskip("torch")
    import feedline.torch as ft

    functional = torch.nn.functional
    path, documents = corpus
    torch.manual_seed(1)
    width, words = 16, 97
    embedding, place, query, key, value, out = (
        torch.randn(shape, dtype=torch.float64) / 4
        for shape in ((words, width), (LONG, width), (width, width), (width, width), (width, width), (width, words))
    )

    def logits(tokens, positions, mask):
        """A layer of causal attention: tokens of a row, or of several."""
        x = embedding[tokens % words] + place[positions]
        x = x + functional.scaled_dot_product_attention(x @ query, x @ key, x @ value, attn_mask=mask)
        return torch.tanh(x) @ out

    def loss(logits, labels):
        return functional.cross_entropy(logits.flatten(0, -2), labels.flatten(), ignore_index=-100, reduction="sum")

    def causal(length):
        return torch.ones(length, length, dtype=torch.bool).tril()

    single = 0
    for piece in map(torch.from_numpy, pieces(documents)):
        piece = piece.long()
        single += loss(logits(piece, torch.arange(len(piece)), causal(len(piece)))[:-1], piece[1:] % words)
    masked = flat = 0
    for batch in batches(path, ft):
        tokens, positions, numbers = (batch[name].long() for name in ("tokens", "positions", "documents"))
        labels = torch.where(positions > 0, tokens % words, -100)
        mask = (numbers[:, :, None] == numbers[:, None, :]) & causal(LONG)
        masked += loss(logits(tokens, positions, mask)[:, :-1], labels[:, 1:])
        # As varlen attention does: the documents of the whole batch, one after the other.
        ends = ft.cu_seqlens(batch)
        assert ends.dtype == torch.int32 and ends[0] == 0 and ends[-1] == tokens.numel() and (ends.diff() <= LONG).all()
        tokens, positions, labels = tokens.flatten(), positions.flatten(), labels.flatten()
        for start, end in zip(ends, ends[1:]):
            if end > start:
                own = logits(tokens[start:end], positions[start:end], causal(int(end - start)))
                flat += loss(own[:-1], labels[start + 1 : end])
    assert abs(masked - single) < 1e-6 * single
    assert abs(flat - single) < 1e-6 * single


def test_concatenated_documents_fill_the_rows(corpus):
    path, documents = corpus
    rows = [row.copy() for batch in batches(path, longer="concatenate") for row in np.asarray(batch["tokens"])]
    tokens = np.concatenate(documents)
    assert len(rows) == -(-len(tokens) // LONG)
    assert (np.concatenate(rows)[: len(tokens)] == tokens).all()


@pytest.mark.parametrize("kept", [False, True])
def test_packed_corpora_are_mixed(corpus, kept):
    path, _ = corpus
    settings = {"documents": 1000, "batch_size": 5, "shard": None, "device": "cpu", "shuffle": 3, "ids": True}
    own = {"tokens": LONG, "longer": "split", "padding": 7}

    def files(kind, count):
        return {kind: [path.with_suffix(f".{kind}{number}") for number in range(count)]}

    rows = files("rows", 2) if kept else {}
    mix = fn.megatron([path, path], packed={**own, **files("bins", 2), **rows}, weights=[3, 1], epoch_len=80, **settings)
    single = [row.tobytes() for batch in fn.megatron(path, packed={**own, "bins": path.with_suffix(".bins0")}, **settings)
              for row in np.asarray(batch["tokens"])]
    mixed = [(sample, row.tobytes()) for batch in mix for sample, row in zip(np.asarray(batch["ids"]), np.asarray(batch["tokens"]))]
    first = {row for sample, row in mixed if sample < len(single)}
    assert len(mixed) == 80 and sum(sample < len(single) for sample, _ in mixed) == 60
    assert first <= set(single) and {row for _, row in mixed} <= set(single)
    with pytest.raises(Error, match="1 bins, and 2 are needed: one file for each path of a mix"):
        len(fn.megatron([path, path], packed={**own, **files("bins", 1)}, weights=[3, 1], **settings))
    with pytest.raises(Error, match="2 bins, and 1 are needed"):
        len(fn.megatron([path, path], packed={**own, **files("bins", 2)}, **settings))


def test_wrong_settings_of_packed_are_named(corpus):
    path, _ = corpus
    with pytest.raises(TypeError, match="there is no setting 'longr'"):
        batches(path, longr="cut")
    with pytest.raises(TypeError, match="packed: bins is missing"):
        fn.megatron(path, packed={"tokens": LONG})
    with pytest.raises(Error, match="padding 4294967296 of field `tokens` does not fit i32"):
        batches(path, padding=2**32)
    with pytest.raises(TypeError, match="padding='x': give a whole number, or a dict from field to number"):
        batches(path, padding="x")
    with pytest.raises(Error, match="subset, take and leave choose documents"):
        fn.megatron(path, packed={"tokens": LONG, "bins": path.with_suffix(".none")}, indices=[0])
    with pytest.raises(TypeError, match="bins=3: give a path, in a mix a list of them"):
        batches(path, bins=3)
    with pytest.raises(TypeError, match="packed=512: give a dict, "):
        fn.megatron(path, packed=512)
    for settings in ({"seq_len": 9}, {"next_token": True}):
        with pytest.raises(Error, match="leave out seq_len and next_token"):
            len(fn.megatron(path, packed={"tokens": LONG, "bins": path.with_suffix(".none")}, **settings))
        with pytest.raises(Error, match="documents are whole"):
            len(fn.megatron(path, documents=1000, **settings))
    # Documents need not be asked for.
    whole = {"tokens": LONG, "bins": path.with_suffix(".whole"), "longer": "split"}
    assert len(fn.megatron(path, packed=whole)) > 0
    with pytest.raises(Error, match='longer "drop"; there are "split", "cut" and "concatenate"'):
        len(batches(path, longer="drop"))
    with pytest.raises(Error, match="split, cut or concatenate longer ones"):
        len(batches(path, longer=None))


FIELDS = ("tokens", "positions", "documents", "cu_seqlens", "max_seqlen")


def fields(loader, names=FIELDS):
    """Every row of an epoch, as bytes by name."""
    return [{name: row.tobytes() for name, row in zip(names, rows)}
            for batch in loader for rows in zip(*(np.asarray(batch[name]) for name in names))]


def parquet(path, documents, kind=None, **beside):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    columns = {"tokens": pa.array(documents, kind or pa.list_(pa.int32()))}
    columns |= {name: pa.array(values, of) for name, (values, of) in beside.items()}
    # Of several groups, with a text that is not wanted.
    pq.write_table(pa.table(columns | {"text": ["x"] * len(documents)}), path, row_group_size=37)
    return path


def large_lists(path, documents):
    pa = pytest.importorskip("pyarrow")
    return parquet(path, documents, pa.large_list(pa.int32()))


def shards(path, documents):
    """Tar members of i32."""
    with tarfile.open(path, "w") as out:
        for number, document in enumerate(documents):
            member = tarfile.TarInfo(f"{number:05d}.tokens")
            member.size = document.nbytes
            out.addfile(member, io.BytesIO(document.tobytes()))
    return path


def crc32c(data):
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ 0x82F63B78 * (crc & 1)
    crc ^= 0xFFFFFFFF
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def records(path, documents):
    """tf.train.Example with a packed Int64List, by its definition."""

    def varint(value):
        out = b""
        while value > 127:
            out, value = out + bytes([value & 127 | 128]), value >> 7
        return out + bytes([value])

    def message(number, data):
        return varint(number << 3 | 2) + varint(len(data)) + data

    with open(path, "wb") as out:
        for document in documents:
            values = message(1, b"".join(map(varint, document.tolist())))
            example = message(1, message(1, message(1, b"tokens") + message(2, message(3, values))))
            head = struct.pack("<Q", len(example))
            out.write(head + crc32c(head) + example + crc32c(example))
    return path


def streaming(path, documents):
    """A zstd shard of MosaicML Streaming, a column of bytes."""
    pa = pytest.importorskip("pyarrow")
    path.mkdir()
    samples = [struct.pack("<I", document.nbytes) + document.tobytes() for document in documents]
    about = {"column_encodings": ["bytes"], "column_names": ["tokens"], "column_sizes": [None], "compression": "zstd",
             "format": "mds", "hashes": [], "size_limit": None, "version": 2}
    text = json.dumps(about, sort_keys=True).encode()
    start = 4 + 4 * (len(samples) + 1) + len(text)
    ends = np.cumsum([start] + [len(sample) for sample in samples]).astype(np.uint32)
    raw = struct.pack("<I", len(samples)) + ends.tobytes() + text + b"".join(samples)
    packed = pa.compress(raw, codec="zstd", asbytes=True)
    (path / "shard.00000.mds.zstd").write_bytes(packed)
    files = {"raw_data": {"basename": "shard.00000.mds", "bytes": len(raw), "hashes": {}},
             "zip_data": {"basename": "shard.00000.mds.zstd", "bytes": len(packed), "hashes": {}}}
    (path / "index.json").write_text(json.dumps({"version": 2, "shards": [about | files | {"samples": len(samples)}]}))
    return path


def lines(path, documents):
    text = "".join(json.dumps({"tokens": document.tolist()}) + "\n" for document in documents).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


def flat(path, documents):
    """The documents but the empty ones, each ended by token 9."""
    np.concatenate([np.append(document, 9) for document in documents]).astype(np.int32).tofile(path)
    return path


DOORS = {
    "parquet": (fn.parquet, parquet, {}),
    "large lists": (fn.parquet, large_lists, {}),
    "webdataset": (fn.webdataset, shards, {"columns": ["tokens:i32:?"]}),
    "mds": (fn.mds, streaming, {"raw": ["tokens:i32:?"]}),
    "tfrecord": (fn.tfrecord, records, {"columns": ["tokens:i64:?"]}),
    "jsonl": (fn.jsonl, lines, {"columns": ["tokens:i32:?"]}),
    "jsonl, gzip": (fn.jsonl, lines, {"columns": ["tokens:i32:?"]}),
}
ENDINGS = {"parquet": "parquet", "large lists": "parquet", "webdataset": "tar", "mds": "mds", "tfrecord": "tfrecord"}
ENDINGS |= {"jsonl": "jsonl", "jsonl, gzip": "jsonl.gz"}


@pytest.mark.parametrize("door", DOORS)
def test_each_door_packs_as_megatron_does(corpus, door):
    path, documents = corpus
    source, write, own = DOORS[door]
    file = write(path.with_name(f"data.{ENDINGS[door]}"), documents)
    settings = {"batch_size": 5, "shard": None, "device": "cpu", "shuffle": 3}

    def packed(name, **more):
        return {"tokens": LONG, "bins": path.with_suffix(f".{name}"), "longer": "split", "padding": -100, "key": 5} | more

    def other():
        return source(file, packed=packed("other", copy=path.with_suffix(".copy")), **own, **settings)

    right = fields(fn.megatron(path, packed=packed("right"), **settings))
    if door == "tfrecord":  # 64 bits
        right = [row | {"tokens": np.frombuffer(row["tokens"], np.int32).astype(np.int64).tobytes()} for row in right]
    loader = other()
    assert fields(loader) == right
    before = path.with_suffix(".copy").stat().st_mtime_ns
    # In the middle of an epoch, and on.
    loader, rows = other(), 0
    for batch in loader:
        rows += len(batch["tokens"])
        if rows == 15:
            break
    state, again = loader.state_dict(), other()
    again.load_state_dict(state)
    assert fields(again) == right[15:]
    assert path.with_suffix(".copy").stat().st_mtime_ns == before
    with pytest.raises(Error, match=r'packed=\{"copy": FILE\}` copies them to a file'):
        source(file, packed=packed("none"), **own, **settings)


def test_documents_of_flat_files_end_with_their_separator(corpus):
    path, documents = corpus
    file = flat(path.with_suffix(".flat"), documents)
    tokens = np.fromfile(file, np.int32)
    right = np.split(tokens, np.flatnonzero(tokens == 9) + 1)
    right = right if len(right[-1]) else right[:-1]
    settings = {"token": "i32", "separator": 9, "shard": None, "device": "cpu"}
    own = {"tokens": LONG, "bins": path.with_suffix(".bins"), "longer": "split"}
    loader = fn.tokens(file, packed=own, index_file=path.with_suffix(".ends"), **settings)
    assert path.with_suffix(".ends").exists()
    found = [np.asarray(batch["tokens"])[row][start:end].tolist() for batch in loader for row in range(len(batch["tokens"]))
             for start, end in zip(*(np.asarray(batch["cu_seqlens"])[row][cut] for cut in (slice(-1), slice(1, None)))) if end > start]
    assert sorted(found) == sorted(piece.tolist() for piece in pieces(right))
    with pytest.raises(Error, match="give separator, the token that ends a document"):
        fn.tokens(file, token="i32", packed=own)
    with pytest.raises(TypeError, match="give seq_len, the tokens of a window, or separator"):
        fn.tokens(file)
    with pytest.raises(Error, match="separator makes documents, seq_len windows"):
        fn.tokens(file, seq_len=8, **settings)
    with pytest.raises(Error, match="token 50256 does not occur in 1 files"):
        fn.tokens(file, **settings | {"separator": 50256}, packed=own | {"bins": path.with_suffix(".none")})


def test_labels_and_weights_are_packed_with_their_tokens(corpus):
    pa = pytest.importorskip("pyarrow")
    path, documents = corpus
    labels = [[-token - 1 for token in document.tolist()] for document in documents]
    weights = [[token % 7 / 4 for token in document.tolist()] for document in documents]
    beside = {"labels": (labels, pa.list_(pa.int64())), "weights": (weights, pa.list_(pa.float32()))}
    file = parquet(path.with_suffix(".parquet"), documents, **beside)
    own = {"tokens": LONG, "bins": path.with_suffix(".three"), "copy": path.with_suffix(".copy"), "longer": "split",
           "field": ["tokens", "labels", "weights"], "padding": {"labels": -100, "tokens": 7}}
    loader = fn.parquet(file, packed=own, batch_size=5, shard=None, device="cpu")
    alone = fields(batches(path), ["tokens"])
    assert [{"tokens": row["tokens"]} for row in fields(loader)] == alone
    for batch in loader:
        tokens, labels, weights, numbers = (np.asarray(batch[name]) for name in ("tokens", "labels", "weights", "documents"))
        real = numbers >= 0
        assert (labels[real] == -tokens[real].astype(np.int64) - 1).all() and (labels[~real] == -100).all()
        assert (weights[real] == (tokens[real] % 7 / 4).astype(np.float32)).all() and (weights[~real] == 0).all()


def test_other_lengths_of_a_field_are_named(corpus):
    pa = pytest.importorskip("pyarrow")
    path, documents = corpus
    labels = [document.tolist() for document in documents]
    labels[12] = labels[12][1:]
    file = parquet(path.with_suffix(".parquet"), documents, labels=(labels, pa.list_(pa.int32())))
    own = {"tokens": LONG, "bins": path.with_suffix(".bins"), "copy": path.with_suffix(".copy"), "field": ["tokens", "labels"]}
    lens = len(labels[12]), len(documents[12])
    with pytest.raises(ShapeError, match=f"field `labels` has {lens[0]} elements and field `tokens` has {lens[1]}.*sample=12"):
        fn.parquet(file, packed=own)


def test_take_and_leave_choose_documents_of_one_copy(corpus):
    path, documents = corpus
    file = parquet(path.with_suffix(".parquet"), documents)
    copy = path.with_suffix(".copy")

    def part(name, **choice):
        own = {"tokens": LONG, "bins": path.with_suffix(f".{name}"), "copy": copy, "longer": "split"}
        loader = fn.parquet(file, packed=own, shard=None, device="cpu", **choice)
        return sorted(np.asarray(batch["tokens"])[row][start:end].tolist() for batch in loader for row in range(len(batch["tokens"]))
                      for start, end in zip(*(np.asarray(batch["cu_seqlens"])[row][cut] for cut in (slice(-1), slice(1, None)))) if end > start)

    taken, left = part("taken", take=(0.3, 1)), part("left", leave=(0.3, 1))
    assert taken and left and sorted(taken + left) == sorted(piece.tolist() for piece in pieces(documents))
    with pytest.raises(ChangedError, match="bins of another dataset"):
        part("taken", leave=(0.3, 1))
    checked = fn.parquet(file, packed={"tokens": LONG, "bins": path.with_suffix(".c"), "copy": path.with_suffix(".c2"), "longer": "split"},
                         checked=path.with_suffix(".crc"), shard=None, device="cpu")
    assert len(checked) and path.with_suffix(".crc").exists()


def test_the_example_of_the_page_runs(tmp_path, monkeypatch):
    pytest.importorskip("pyarrow")
    pytest.importorskip("torch")
    page = (Path(__file__).resolve().parents[1] / "docs/guide/sources.md").read_text()
    example = next(block for block in re.findall(r"```python\n(.*?)```", page, re.S) if "corpus.jsonl" in block)
    assert len(example.splitlines()) <= 10
    monkeypatch.chdir(tmp_path)
    texts = ["a word " * (number % 90) for number in range(300)]
    Path("corpus.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))

    class tokenizer:
        encode = staticmethod(lambda text: list(text.encode()))

    names = {"tokenizer": tokenizer, "end_of_text": 256}
    exec(example, names)
    rows = [row for batch in names["loader"] for row in batch["ids"].tolist()]
    assert sum(token == 256 for row in rows for token in row) == 300


def test_the_report_says_why_rows_are_not_full(corpus):
    path, _ = corpus
    own = {"tokens": 4096, "documents_max": 64}
    loader = fn.megatron(path, packed={"bins": path.with_suffix(".short")} | own, shard=None, device="cpu")
    next(iter(loader))
    assert re.search(r"% full \(`documents_max=64` limits \d+ % of them: `documents_max=256` has room", loader.report())
