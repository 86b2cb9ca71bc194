"""Loops that train later than they receive, as RL does: killed at any step, each goes on from what it has trained."""

import itertools
import queue
import random
import threading

import numpy as np
import pytest

import feedline
from feedline.errors import ConfigError

fl = pytest.importorskip("feedline.torch", reason="torch is missing")

RECORD, COUNT, BATCH, EPOCHS = 16, 50, 8, 3


def opened(path, **settings):
    settings = {"batch_size": BATCH, "shuffle": 3, "ids": True, "device": "cpu", **settings}
    return fl.records(path, record_bytes=RECORD, **settings)


@pytest.fixture
def data(tmp_path):
    np.zeros((COUNT, RECORD), np.uint8).tofile(tmp_path / "records.bin")
    return tmp_path / "records.bin"


def receiver(loader, ahead, killed):
    """The thread that generates: it puts batches into the queue `ahead`, up to 3 before they are trained."""

    def put(item):
        while not killed.is_set():
            try:
                return ahead.put(item, timeout=0.01)
            except queue.Full:
                pass

    def receive():
        while loader.next_epoch < EPOCHS and not killed.is_set():
            for batch in loader:
                put((batch["ids"].tolist(), loader.received, loader.state_dict()))
                if killed.is_set():
                    break
        put(None)

    thread = threading.Thread(target=receive)
    thread.start()
    return thread


def behind_a_queue(ahead, begin, steps, _draws):
    for ids, _, state in ahead[:steps]:
        yield ids, state


def in_any_order(ahead, begin, steps, draws):
    frontier = begin
    draws.shuffle(ahead)
    for ids, received, _ in ahead[:steps]:
        frontier = feedline.state_trained(frontier, *received)
        with pytest.raises(ConfigError, match="was trained before"):
            feedline.state_trained(frontier, *received)
        yield ids, frontier


def by_samples(ahead, begin, steps, _draws):
    """A step is 5 samples, also where it ends within a batch."""
    samples = [number for ids, *_ in ahead for number in ids]
    for end in range(5, len(samples) + 1, 5)[:steps]:
        yield samples[end - 5 : end], feedline.state_at(begin, end)
    if len(samples) % 5 and steps * 5 > len(samples):
        yield samples[len(samples) // 5 * 5 :], feedline.state_at(begin, len(samples))


@pytest.mark.parametrize("trainer", [behind_a_queue, in_any_order, by_samples])
def test_a_killed_loop_trains_each_sample_once_an_epoch(data, trainer):
    draws, trained = random.Random(1), []
    frontier = opened(data).state_dict()
    for _ in range(200):
        loader, ahead, killed = opened(data), queue.Queue(3), threading.Event()
        loader.load_state_dict(frontier)
        thread = receiver(loader, ahead, killed)
        received = list(itertools.islice(iter(ahead.get, None), None if draws.random() < 0.1 else 2))
        for ids, frontier in trainer(received, frontier, draws.randrange(12), draws):
            trained += ids
        # Nothing but `trained` and the frontier outlives the kill.
        killed.set()
        thread.join()
        if frontier["epoch"] == EPOCHS or len(trained) == EPOCHS * COUNT:
            break
    assert sorted(trained) == sorted(EPOCHS * list(range(COUNT)))


def test_a_count_that_cannot_be_is_named(data):
    state = opened(data, last_batch="drop").state_dict()
    with pytest.raises(ConfigError, match="give 8 or 16 samples"):
        feedline.state_at(state, 9)
    assert feedline.state_at(state, 48)["epoch"] == 1
    for call in (lambda: feedline.state_at(state, True), lambda: feedline.state_trained(b"", 0, 0)):
        with pytest.raises(TypeError):
            call()
