"""Samples drawn by weights, and by class."""

import numpy as np
import pytest

import feedline
import feedline.numpy as fn

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

COUNT = 100


@pytest.fixture
def table(tmp_path):
    """100 rows in chunks of 16; 10 of class 1, the others of class 0."""
    path = tmp_path / "t.parquet"
    label = [int(k >= 90) for k in range(COUNT)]
    pq.write_table(pa.table({"x": range(COUNT), "label": label, "text": ["a"] * COUNT}), path, row_group_size=16)
    return path


def open_table(path, **settings):
    settings = {"columns": ["x", "label"], "batch_size": 10, "ids": True, "shuffle": 3, **settings}
    return fn.parquet(path, **settings)


def drawn(loader, epoch=0):
    return [id for batch in loader.epoch(epoch) for id in batch["ids"].tolist()]


@pytest.mark.parametrize("kind", [list, np.asarray, lambda w: np.asarray(w, np.float32)])
def test_samples_come_by_their_weights(table, kind):
    weights = kind([3.0 if k < 50 else 1.0 if k < 99 else 0.0 for k in range(COUNT)])
    ids = drawn(open_table(table, sample_weights=weights, draws=10_000))
    share = sum(id < 50 for id in ids) / len(ids)
    assert len(ids) == 10_000 and 0.73 < share < 0.77 and 99 not in ids
    once = drawn(open_table(table, sample_weights=weights, draws=60, replacement=False))
    assert len(set(once)) == 60 and 99 not in once


def test_every_class_comes_equally_often(table):
    loader = open_table(table, weights_of="label", draws=10_000)
    labels = [label for batch in loader for label in batch["label"].tolist()]
    assert 0.48 < sum(labels) / len(labels) < 0.52


def test_each_draw_of_a_picture_has_its_own_crop(tmp_path):
    image = pytest.importorskip("PIL.Image")
    noise = np.random.default_rng(1).integers(0, 256, (90, 120, 3), dtype=np.uint8)
    for number in range(3):
        image.fromarray(noise).save(tmp_path / f"{number}.png")
    loader = fn.images(tmp_path, size=32, sample_weights=[1, 0, 5], draws=40, batch_size=8, shuffle=1)
    crops = [picture.tobytes() for batch in loader for picture in batch["image"]]
    assert len(set(crops)) == len(crops) == 40


def test_ranks_share_the_draws_and_a_run_goes_on(table):
    weights = np.arange(1.0, 101)
    whole = drawn(open_table(table, sample_weights=weights, draws=120))
    ranks = [open_table(table, sample_weights=weights, draws=120, shard=(rank, 3), batch_size=4, last_batch="drop") for rank in range(3)]
    parts = [[batch["ids"].tolist() for batch in rank] for rank in ranks]
    assert [id for step in zip(*parts) for part in step for id in part] == whole
    first = open_table(table, sample_weights=weights, draws=120)
    batches = iter(first)
    before = [id for _ in range(5) for id in next(batches)["ids"].tolist()]
    state = first.state_dict()
    again = open_table(table, sample_weights=weights, draws=120)
    again.load_state_dict(state)
    assert before + [id for batch in again for id in batch["ids"].tolist()] == whole
    other = open_table(table, sample_weights=weights[::-1], draws=120)
    with pytest.raises(feedline.errors.StateError, match="different weights"):
        other.load_state_dict(state)


def test_weights_change_between_two_epochs(table):
    loader = open_table(table, sample_weights=[1.0] * COUNT)
    batches = iter(loader)
    next(batches)
    with pytest.raises(feedline.errors.Error, match="alive"):
        loader.set_sample_weights([1.0] * COUNT)
    batches.close()
    with pytest.raises(feedline.errors.ConfigError, match="between two epochs"):
        loader.set_sample_weights([1.0] * COUNT)
    drawn(loader)
    loader.set_sample_weights(1.0 * (np.arange(COUNT) == 7))
    assert set(drawn(loader, 1)) == {7}
    with pytest.raises(feedline.errors.ConfigError, match="the order has 3 weights"):
        loader.set_sample_weights([1, 2, 3])
    with pytest.raises(feedline.errors.ConfigError, match="was not made with sample_weights"):
        open_table(table).set_sample_weights([1.0] * COUNT)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"sample_weights": [1.0] * COUNT, "shuffle": None}, "shuffle, the seed of the draws, is missing"),
        ({"sample_weights": [1.0] * COUNT, "weights_of": "label"}, "not both"),
        ({"sample_weights": [1.0] * COUNT, "window": 2}, "are not for a mix, indices, window"),
        ({"sample_weights": [1.0] * 99}, "99 weights, the dataset has 100 samples"),
        ({"sample_weights": [1.0] * 99 + [-1.0]}, "the weight of sample 99 is -1"),
        ({"sample_weights": [0.0] * COUNT}, "no sample can be drawn"),
        ({"sample_weights": [1.0] * 9 + [0.0] * 91, "replacement": False}, "100 draws without replacement, and 9"),
        ({"weights_of": "label", "replacement": False}, "replacement=False is for sample_weights"),
        ({"weights_of": "nothing"}, "nothing"),
        ({"draws": 5}, "draws and replacement are for"),
    ],
)
def test_settings_that_do_not_fit_are_refused(table, settings, words):
    with pytest.raises(feedline.errors.Error, match=words):
        open_table(table, **settings)


def test_a_weight_that_is_no_number_is_named(table):
    with pytest.raises(TypeError, match=r"sample_weights\[1\]='b': give a list of numbers"):
        open_table(table, sample_weights=[1.0, "b"])
