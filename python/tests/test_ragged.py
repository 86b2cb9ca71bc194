"""Lengths that are known before reading, and rows side by side without padding, against the padded batches."""

from pathlib import Path

import numpy as np
import pytest

import feedline.numpy as fn
from feedline import errors

FIXTURES = Path(__file__).resolve().parents[2] / "tests" / "fixtures"

#: Sources with a field of varying length: what opens them, the field, and whether its index knows the lengths.
SOURCES = [
    (lambda **s: fn.megatron(FIXTURES / "tokens" / "megatron-u16", documents=1000, **s), "tokens", True),
    (lambda **s: fn.tfrecord(FIXTURES / "tfrecord" / "example.tfrecord", columns=["ids:i64:?"], up_to=11, **s), "ids", False),
    (lambda **s: fn.parquet(FIXTURES / "parquet" / "default.parquet", columns=["tok"], up_to=5, **s), "tok", False),
    (lambda **s: fn.mds(FIXTURES / "mds" / "raw", columns=["bytes"], up_to=600, **s), "bytes", False),
]


@pytest.mark.parametrize("opened, name, known", SOURCES)
def test_lengths_are_those_of_a_naive_pass(opened, name, known, tmp_path):
    naive = np.concatenate([batch[f"{name}.lens"] for batch in opened()])
    if not known:
        with pytest.raises(errors.ConfigError, match=f"the index has no lengths of field `{name}`: `lengths_file` reads them once"):
            opened().lengths(name)
    for _ in range(2):
        lengths = opened(lengths_file=tmp_path / "lengths").lengths(name)
        assert lengths.dtype == np.uint64 and lengths.tolist() == naive.tolist()
    part = opened(lengths_file=tmp_path / "lengths", subset=[2, 0]).lengths(name)
    assert part.tolist() == naive[[2, 0]].tolist()
    with pytest.raises(errors.ConfigError, match="no field `tik`"):
        opened().lengths("tik")


@pytest.mark.parametrize("opened, name, known", SOURCES)
def test_ragged_batches_are_the_padded_ones_without_padding(opened, name, known):
    settings = {"shuffle": 3, "batch_size": 4}
    for found, padded in zip(opened(ragged=[name], **settings), opened(**settings), strict=True):
        lens = padded[f"{name}.lens"]
        rows = [row[:length] for row, length in zip(padded[name], lens.tolist())]
        assert np.array_equal(found[name], np.concatenate(rows))
        assert found[f"{name}.offsets"].tolist() == [0, *np.cumsum(lens).tolist()]
        assert np.array_equal(found[f"{name}.lens"], lens)
    limited = {name: 1 << 20}
    if known:
        assert len(list(opened(ragged=limited, **settings))) == len(opened(**settings))
    else:
        with pytest.raises(errors.ConfigError, match="cannot be limited"):
            opened(ragged=limited, **settings)


def test_map_batch_sees_values_and_offsets_and_torch_takes_them_as_nested():
    torch = pytest.importorskip("torch")
    import feedline.torch as fl

    def one_more(batch):
        batch["tokens"].numpy()[:] += 1

    path = FIXTURES / "tokens" / "megatron-u16"
    padded = fl.megatron(path, documents=1000, batch_size=4)
    ragged = fl.megatron(path, documents=1000, batch_size=4, ragged=["tokens"], map_batch=one_more)
    for found, right in zip(ragged, padded, strict=True):
        nested = fl.nested(found, "tokens")
        assert nested.layout == torch.jagged and nested.values().data_ptr() == found["tokens"].data_ptr()
        rows = [row[:length] for row, length in zip(right["tokens"].int(), right["tokens.lens"].tolist())]
        assert [part.int().tolist() for part in nested.unbind()] == [(row + 1).tolist() for row in rows]
        with pytest.raises(ValueError, match="ragged fields"):
            next(fl.micro(found, 2))
