"""Rows of whole documents: the same as packing by hand, and the same loss as of single documents."""

import numpy as np
import pytest

import feedline.numpy as fn
from feedline.errors import Error

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
    with pytest.raises(Error, match="padding=-1: out of range"):
        batches(path, padding=-1)
    with pytest.raises(TypeError, match="bins=3: give a path, in a mix a list of them"):
        batches(path, bins=3)
    with pytest.raises(TypeError, match="packed=512: give a dict with tokens and bins"):
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
