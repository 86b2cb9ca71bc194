"""Loops, states and settings of the Python loader."""

import copy
import json
import pickle
import threading

import numpy as np
import pytest

import feedline
import feedline.numpy

COUNT, RECORD, BATCH = 100, 48, 16
BATCHES = 7


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "records.bin"
    np.random.default_rng(1).integers(0, 256, (COUNT, RECORD), dtype=np.uint8).tofile(path)
    return path


def open_numpy(path, **settings):
    return feedline.numpy.records(path, record_bytes=RECORD, batch_size=BATCH, shuffle=5, **settings)


def sums(batches):
    return [int(batch["record"].astype(np.int64).sum()) for batch in batches]


def expected(path, epochs):
    """Sums of the batches of whole epochs."""
    loader = open_numpy(path)
    return [sums(loader.epoch(number)) for number in range(epochs)]


def test_a_loop_is_the_next_epoch_each_time(data):
    want, loader = expected(data, 3), open_numpy(data)
    assert len(loader) == BATCHES
    assert [sums(loader) for _ in range(3)] == want
    assert want[0] != want[1]


def test_an_iterator_opens_nothing_before_its_first_batch(data):
    loader = open_numpy(data)
    spare = [iter(loader) for _ in range(3)]
    assert sums(loader) == expected(data, 1)[0]
    # The spare ones are the next epoch, one after the other.
    assert sums(spare[2]) == expected(data, 2)[1]


def test_a_loop_that_breaks_leaves_its_epoch(data):
    want, loader = expected(data, 2), open_numpy(data)
    for number, batch in enumerate(loader):
        if number == 2:
            break
    assert sums(loader) == want[1]


def test_a_loop_that_is_still_alive_does_not_hold_the_next_one_up_and_says_that_it_ended(data):
    want, loader = expected(data, 3), open_numpy(data)
    for begin, after in ((lambda: iter(loader), 1), (lambda: loader.epoch(1), 2)):
        kept = begin()
        next(kept)
        state = loader.state_dict()
        assert sums(loader) == want[after]
        with pytest.raises(RuntimeError, match="ended by a newer loop"):
            next(kept)
    with pytest.raises(RuntimeError, match="ended by a newer loop"):
        list(zip(loader, loader, strict=True))
    kept = iter(loader)
    next(kept)
    loader.load_state_dict(state)
    with pytest.raises(RuntimeError, match="load_state_dict"):
        next(kept)
    # An end is an end, also on purpose.
    kept = loader.epoch()
    assert len(sums(kept)) == BATCHES - 1 and len(sums(loader)) == BATCHES and list(kept) == []
    with loader.epoch() as kept:
        next(kept)
    assert list(kept) == []


def test_threads_share_an_iterator_that_none_of_them_has_opened(data):
    for _ in range(20):
        loader = open_numpy(data)
        shared, seen = iter(loader), []
        threads = [threading.Thread(target=lambda: seen.extend(sums(shared))) for _ in range(4)]
        [thread.start() for thread in threads], [thread.join() for thread in threads]
        assert sorted(seen) == sorted(expected(data, 1)[0])


def test_a_loader_is_not_copied(data):
    for attempt in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="build it in the process that uses it"):
            attempt(open_numpy(data))


def test_a_state_is_plain_and_goes_on_after_the_last_batch(data):
    want, loader = expected(data, 3), open_numpy(data)
    assert sums(loader) == want[0]
    for number, batch in enumerate(loader):
        if number == 2:
            state = json.loads(json.dumps(loader.state_dict()))
            break
    assert len(json.dumps(state)) < 1024
    other = open_numpy(data, workers=1)
    other.load_state_dict(state)
    assert sums(other) == want[1][3:] and sums(other) == want[2]
    # Also in the same process, in the middle of another loop.
    kept = iter(loader)
    next(kept)
    loader.load_state_dict(state)
    assert sums(loader) == want[1][3:]


def test_set_epoch_chooses_the_next_loop_and_keeps_a_loaded_place(data):
    want, loader = expected(data, 6), open_numpy(data)
    loader.set_epoch(4)
    assert sums(loader) == want[4] and sums(loader) == want[5]
    loader.sampler.set_epoch(1)
    taken = iter(loader)
    next(taken)
    state = loader.state_dict()
    for epoch, rest in ((1, want[1][1:]), (3, want[3])):
        other = open_numpy(data)
        other.load_state_dict(state)
        other.set_epoch(epoch)
        assert sums(other) == rest
    assert len(loader.sampler) == COUNT


def test_settings_that_nobody_knows_are_refused_by_name(data):
    with pytest.raises(TypeError, match="there is no setting 'batchsize'"):
        feedline.numpy.records(data, record_bytes=RECORD, batchsize=4)
    with pytest.raises(TypeError, match="workers='two'"):
        feedline.numpy.records(data, record_bytes=RECORD, workers="two")
    with pytest.raises(ValueError, match="cache_bytes is for a cache"):
        feedline.numpy.records(data, record_bytes=RECORD, cache_bytes=5)
    with pytest.raises(ValueError, match="epoch -1: epochs are counted from 0"):
        open_numpy(data).set_epoch(-1)


def test_measurements_are_numbers_words_and_files(data):
    loader = open_numpy(data)
    assert loader.what_if() is None and loader.snapshot()["consumer"]["batches"] == 0
    for _ in range(3):
        sums(loader)
    assert loader.snapshot()["consumer"]["samples"] == 3 * COUNT
    prediction = loader.what_if(workers=8, cached=True)
    assert prediction["items_per_s"] > 0 and prediction["bound_by"]
    assert f'feedline_samples_total{{loader="run",rank="0"}} {3 * COUNT}' in loader.metrics("run")
    assert json.loads(loader.trace())["traceEvents"]
    assert loader._repr_html_().startswith("<pre>dataset")
    with pytest.raises(TypeError, match="worker"):
        loader.what_if(worker=8)
