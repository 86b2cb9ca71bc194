"""Loops, states and settings of the Python loader."""

import copy
import gc
import json
import os
import pickle
import subprocess
import sys
import threading
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from conftest import eventually

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
    with pytest.raises(ValueError, match="epoch -1: give a whole number from 0"):
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
    verdict = loader.verdict()
    assert verdict["headline"] in loader.report() and verdict["cause"] and verdict["stages"][0]["ceiling_items_per_s"] > 0
    assert verdict["version"] == 1 and {"measure", "value", "unit", "text"} == set(verdict["evidence"][0])
    assert all({"remedy", "setting", "value", "prediction", "text"} == set(advice) for advice in verdict["advice"])
    page = loader._repr_html_()
    ElementTree.fromstring(page)
    assert "your loop" in page and "decode workers" in page and "records of 48 bytes" in page
    assert "no batch was handed out" in open_numpy(data)._repr_html_()
    assert repr(loader).startswith("Loader of 100 records")
    with pytest.raises(TypeError, match="worker"):
        loader.what_if(worker=8)


def test_epochs_that_are_dropped_in_the_middle_leave_nothing_behind(data):
    def held():
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * 4096, len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    loader = open_numpy(data)

    def drop(epochs):
        for number in range(epochs):
            for place, _ in enumerate(loader):
                if place == number % BATCHES:
                    break
        return held()

    (bytes_before, files, threads), (bytes_after, *_) = drop(100), drop(1000)
    assert bytes_after < bytes_before + (8 << 20)
    assert eventually(lambda: held()[1] <= files + 2 and held()[2] <= threads), (held(), files, threads)


def test_set_epoch_is_part_of_the_state(data):
    want, loader = expected(data, 5), open_numpy(data)
    sums(loader)
    loader.set_epoch(3)
    assert loader.next_epoch == 3
    other = open_numpy(data)
    other.load_state_dict(loader.state_dict())
    assert sums(other) == want[3] and sums(loader) == want[3]


def test_a_state_that_does_not_fit_leaves_the_loop_alone(data):
    want, loader = expected(data, 1), open_numpy(data)
    other = feedline.numpy.records(data, record_bytes=RECORD, batch_size=BATCH, shuffle=6)
    running = iter(loader)
    first = sums([next(running)])
    with pytest.raises(feedline.errors.StateError, match="seed"):
        loader.load_state_dict(other.state_dict())
    assert first + sums(running) == want[0]


def test_a_state_goes_on_with_another_batch_size(data):
    loader, ids = open_numpy(data, ids=True), []
    for number, batch in enumerate(loader):
        ids += batch["ids"].tolist()
        if number == 2:
            break
    other = feedline.numpy.records(data, record_bytes=RECORD, batch_size=10, shuffle=5, ids=True)
    with pytest.raises(feedline.errors.StateError, match="global batch is 16 in the state, 10 in the loader.*resume rebatched"):
        other.load_state_dict(loader.state_dict())
    other.load_state_dict(loader.state_dict(), rebatched=True)
    rest = [batch["ids"].tolist() for batch in other]
    assert [len(part) for part in rest] == [10] * 5 + [2]
    whole = [id for batch in open_numpy(data, ids=True) for id in batch["ids"].tolist()]
    assert ids + sum(rest, []) == whole


def test_a_loader_that_is_closed_in_a_loop_says_so(data):
    loader = open_numpy(data)
    with pytest.raises(RuntimeError, match="ended by close"):
        for _ in loader:
            loader.close()


def test_two_loops_in_threads_never_take_an_ended_epoch_for_a_whole_one(data):
    loader, whole = open_numpy(data), []

    def loop():
        for _ in range(30):
            try:
                whole.append(len(sums(loader)))
            except RuntimeError as error:
                assert "ended by" in str(error) or "alive" in str(error)

    threads = [threading.Thread(target=loop) for _ in range(2)]
    [thread.start() for thread in threads], [thread.join() for thread in threads]
    assert set(whole) <= {BATCHES}


def test_ranks_fill_the_last_batch_up_with_samples(data):
    ranks = [open_numpy(data, shard=(rank, 3), ids=True) for rank in range(3)]
    batches = [[batch["ids"].tolist() for batch in rank] for rank in ranks]
    assert all(len(rank) == 3 and all(len(part) == BATCH for part in rank) for rank in batches)
    seen = [id for rank in batches for part in rank for id in part]
    assert set(seen) == set(range(COUNT)) and len(seen) == 3 * 3 * BATCH
    for last in ("keep", "mask"):
        with pytest.raises(feedline.errors.ConfigError, match=f'"{last}".* blank rows, which ids=True marks'):
            open_numpy(data, shard=(0, 3), last_batch=last)
    exact = [open_numpy(data, shard=(rank, 3), ids=True, last_batch="mask") for rank in range(3)]
    rows = [id for rank in exact for batch in rank for id, status in zip(batch["ids"].tolist(), batch["status"]) if status == 0]
    assert sorted(rows) == list(range(COUNT))


def test_samples_are_chosen_joined_and_mixed(data, tmp_path):
    other = tmp_path / "other.bin"
    np.full((COUNT, RECORD), 7, dtype=np.uint8).tofile(other)

    def ids(path=data, **settings):
        loader = feedline.numpy.records(path, record_bytes=RECORD, batch_size=BATCH, ids=True, **settings)
        return [id for batch in loader for id in batch["ids"].tolist()]

    assert ids(subset=[5, 3, 5]) == [0, 1, 2] and ids(indices=[5, 3, 5]) == [5, 3, 5]
    assert sorted(ids(indices=[5, 3, 9], shuffle=1)) == [3, 5, 9]
    assert (len(ids(take=(0.2, 1))), len(ids(leave=(0.2, 1)))) == (20, 80)
    assert ids([data, other]) == list(range(2 * COUNT))
    mixed = feedline.numpy.records([data, other], record_bytes=RECORD, batch_size=200, weights=[1, 3], shuffle=4, ids=True)
    counts = np.bincount(next(iter(mixed))["ids"].astype(np.int64) // COUNT)
    assert counts.tolist() == [50, 150]
    refused = [
        ({"schedule": [(0, [1, 1])], "weights": [1, 1], "shuffle": 1}, "give one of them"),
        ({"schedule": [], "shuffle": 1}, "has no segments"),
        ({"schedule": [(0, [1, 1]), (9, [0, 0])], "shuffle": 1}, "segment 1 of the mix has no weight above 0"),
        ({"epoch_len": 5}, "epoch_len is for a mix"),
        ({"weights": [1], "shuffle": 1}, "1 weights for 2 paths"),
        ({"weights": [1, 2]}, "shuffle, its seed, is missing"),
        ({"subset": [1], "take": (0.5, 1)}, "only one of them"),
        ({"indices": [1], "window": 2}, "window, lanes and lengths are not for"),
        ({"weights": [1, 2], "shuffle": 1, "subset": [1]}, "not for a mix"),
    ]
    for settings, words in refused:
        with pytest.raises(feedline.errors.ConfigError, match=words):
            ids([data, other], **settings)


def test_a_mix_changes_its_weights_and_gets_more_paths(data, tmp_path):
    paths = [data]
    for value in (7, 8):
        np.full((COUNT, RECORD), value, dtype=np.uint8).tofile(tmp_path / f"{value}.bin")
        paths.append(tmp_path / f"{value}.bin")

    def of(count, *schedule):
        settings = {"shuffle": 4, "ids": True, "epoch_len": 400, "batch_size": 20}
        return feedline.numpy.records(paths[:count], record_bytes=RECORD, schedule=list(schedule), **settings)

    def parts(batches):
        return [np.bincount(batch["ids"].astype(np.int64) // COUNT, minlength=3).tolist() for batch in batches]

    first = (0, [1, 1])
    mixed = of(2, first, (200, [0.9, 0.1]))
    assert parts(mixed) == [[10, 10, 0]] * 10 + [[18, 2, 0]] * 10
    assert mixed.snapshot()["consumer"]["sources"][1] == {
        "delivered": 120,
        "asked": pytest.approx(120),
        "samples": COUNT,
        "passes": 1.2,
    }
    assert "mixture   source 0: 280 samples of 280.0 asked, 2.80 passes over 100" in mixed.report()
    running = of(2, first)
    batches = iter(running)
    next(batches), next(batches)
    state = running.state_dict()
    later = of(3, first, (40, [0, 0.5, 0.5]))
    later.load_state_dict(state)
    assert parts(later) == [[0, 10, 10]] * 18
    with pytest.raises(feedline.errors.StateError, match="before position 40 of epoch 0"):
        of(3, first, (39, [0, 1, 1])).load_state_dict(state)
    ramp = feedline.ramp(100, 300, [1], [0, 1])
    assert (len(ramp), ramp[0][0], ramp[64]) == (65, 100, (300, [0, 1]))
    assert sum(parts(of(2, first, *ramp))[-1][1:]) == 20


SUB_INTERPRETER = """
import sys

try:
    import _interpreters as interpreters
    other = interpreters.create("legacy")
except ImportError:
    import _xxsubinterpreters as interpreters
    other = interpreters.create(isolated=False)
for imported in ("feedline", "feedline._native"):
    tries = f"try: import {imported}\\nexcept ImportError as error: assert 'main interpreter only' in str(error), error"
    tries += "\\nelse: raise SystemError('imported')"
    failed = interpreters.run_string(other, f"import sys; sys.path[:] = {sys.path}\\n" + tries)
    assert failed is None, failed
import feedline
interpreters.destroy(other)
print(feedline.__version__)
"""


def test_a_sub_interpreter_is_refused_and_the_main_one_goes_on():
    done = subprocess.run([sys.executable, "-c", SUB_INTERPRETER], capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, feedline.__version__), done.stderr
