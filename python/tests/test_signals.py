"""Signals and exits: what the settings promise, in processes of their own.

    pytest python/tests/test_signals.py
"""

import subprocess
import sys

import numpy as np
import pytest

BEGIN = """
import gc, os, signal, sys, threading, time
import numpy as np
import feedline, feedline.numpy as fl

def loader(**settings):
    return fl.records("records.bin", record_bytes=8, batch_size=10, **{"stop_on_signals": True, **settings})

def send(number=signal.SIGTERM):
    os.kill(os.getpid(), number)

def place(loader):
    state = loader.state_dict()
    return state["epoch"], state["batch"]
"""

# What a process does, what it prints, and how it ends.
CASES = {
    "a_batch_that_comes_with_a_signal_is_the_next_one": (
        """
signal.signal(signal.SIGINT, signal.default_int_handler)
asked, seen, ended = 0, [], 0
def mapped(batch, *_):
    first = int(batch["record"][0, 0])
    if first in (10, 30):
        # While the loop waits for this batch, and just before it comes.
        while asked <= first // 10: time.sleep(0.001)
        time.sleep(0.05)
        send(signal.SIGINT)
epoch = iter(loader(stop_on_signals=None, map_batch=mapped, workers=1))
while True:
    try:
        asked += 1
        seen.append(int(next(epoch)["record"][0, 0]))
    except KeyboardInterrupt: ended += 1
    except StopIteration: break
print(seen, ended)
""",
        "[0, 10, 20, 30, 40] 2",
        0,
    ),
    "a_loop_ends_behind_the_batch_of_the_signal": (
        """
run, seen = loader(), 0
for epoch in range(3):
    for _ in run:
        seen += 1
        if seen == 3:
            send()
print(seen, run.stop_requested, place(run), run.next_epoch)
""",
        "3 True (0, 3) 0",
        0,
    ),
    "a_signal_at_the_last_batch_finds_the_epoch_at_its_end": (
        """
run, seen = loader(), 0
for _ in run:
    seen += 1
    if seen == 5:
        send()
other = loader(stop_on_signals=None)
other.load_state_dict(run.state_dict())
print(seen, place(run), len(list(other)), len(list(other)))
""",
        "5 (1, 0) 5 5",
        0,
    ),
    "a_signal_between_epochs_ends_the_next_loop_before_its_first_batch": (
        "run = loader(); print(len(list(run))); send(); print(len(list(run)), len(list(run)), place(run))",
        "5\n0 0 (1, 0)",
        0,
    ),
    "loops_that_choose_their_epoch_stay_where_they_were_stopped": (
        """
for choose in ("set_epoch", "sampler", "epoch"):
    run, seen = loader(), 0
    for epoch in range(3):
        if choose == "set_epoch": run.set_epoch(epoch)
        if choose == "sampler": run.sampler.set_epoch(epoch)
        for _ in run.epoch(epoch) if choose == "epoch" else run:
            seen += 1
            if seen == 7: run._request_stop()
    print(seen, place(run), run.next_epoch)
""",
        "7 (1, 2) 1\n7 (1, 2) 1\n7 (1, 2) 1",
        0,
    ),
    "a_forked_child_ends_by_the_signal": (
        """
run = loader()
child = os.fork()
if child == 0:
    send(); time.sleep(10); os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), run.stop_requested)
""",
        "-15 False",
        0,
    ),
    "a_signal_while_the_loader_is_built_counts": (
        """
class Sending:
    def __len__(self): return 20
    def __getitem__(self, index): return np.int64(index)
import warnings; warnings.simplefilter("ignore")
from feedline import _signals
install = _signals.install
_signals.install = lambda: (install(), send())
run = fl.dataset(Sending(), batch_size=10, stop_on_signals=True); print(len(list(run)), run.stop_requested)
del run; gc.collect()
try: loader(shard=(3, 2))
except ValueError: print(signal.getsignal(signal.SIGTERM) is signal.SIG_DFL)
""",
        "0 True\nTrue",
        0,
    ),
    "a_signal_before_the_first_loop_counts": ("run = loader(); send(); print(len(list(run)), place(run))", "0 (0, 0)", 0),
    "a_signal_ends_a_wait": (
        """
gate = threading.Event()
class Slow:
    def __len__(self): return 40
    def __getitem__(self, index):
        if 20 <= index < 30: gate.wait()
        return np.int64(index)
import warnings; warnings.simplefilter("ignore")
run = fl.dataset(Slow(), batch_size=10, stop_on_signals=True, workers=1, slots=2)
def later():
    while seen < 2: time.sleep(0.01)
    send(); time.sleep(0.3)
seen = 0
thread = threading.Thread(target=later); thread.start()
for batch in run:
    seen += 1
    del batch
print(seen, place(run)); thread.join(); gate.set()
""",
        "2 (0, 2)",
        0,
    ),
    "sigusr1_counts_as_well": (
        "run = loader()\nfor n, _ in enumerate(run): n or send(signal.SIGUSR1)\nprint(n, run.stop_requested)",
        "0 True",
        0,
    ),
    "an_earlier_handler_is_called_and_comes_back": (
        """
signal.signal(signal.SIGTERM, own := lambda number, frame: print("own"))
run = loader()
for n, _ in enumerate(run): n or send()
print(n); del run; gc.collect()
print(signal.getsignal(signal.SIGTERM) is own, signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL); send()
""",
        "own\n0\nTrue True\nown",
        0,
    ),
    "a_later_handler_takes_the_signal_and_stays": (
        """
run = loader()
signal.signal(signal.SIGTERM, own := lambda number, frame: print("own"))
for n, _ in enumerate(run): n or send()
print(n, run.stop_requested); del run; gc.collect()
print(signal.getsignal(signal.SIGTERM) is own, signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL)
""",
        "own\n4 False\nTrue True",
        0,
    ),
    "a_later_handler_may_call_ours": (
        """
run = loader(); ours = signal.getsignal(signal.SIGTERM)
signal.signal(signal.SIGTERM, lambda number, frame: ours(number, frame))
for n, _ in enumerate(run): n or send()
print(n, run.stop_requested)
""",
        "0 True",
        0,
    ),
    "a_handler_in_c_comes_back": (
        """
import faulthandler; faulthandler.register(signal.SIGUSR1, file=sys.stdout)
run = loader()
for n, _ in enumerate(run): n or send(signal.SIGUSR1)
print(n, flush=True); del run; gc.collect(); send(signal.SIGUSR1)
""",
        "0\nCurrent thread",
        0,
    ),
    "the_process_ends_by_the_signal_once_the_loader_is_gone": (
        "run = loader(); list(run); del run; gc.collect(); send(); print('alive')", "", -15
    ),
    "and_also_where_it_went_in_another_thread": (
        """
held = [loader()]
thread = threading.Thread(target=held.clear); thread.start(); thread.join(); gc.collect()
send(); time.sleep(0.1); print("alive")
""",
        "",
        -15,
    ),
    "an_ignored_signal_is_ignored_again": (
        "signal.signal(signal.SIGTERM, signal.SIG_IGN); run = loader(); del run; gc.collect(); send(); print('alive')", "alive", 0
    ),
    "several_loaders_stop_and_the_last_one_restores": (
        """
a, b = loader(), loader()
for n, _ in enumerate(a):
    if n == 1: del a; gc.collect(); send()
print(n, len(list(b)), b.stop_requested, len(list(loader())))
del b; gc.collect()
print(len(list(loader())), signal.getsignal(signal.SIGTERM) is signal.SIG_DFL)
""",
        "1 0 True 0\n5 True",
        0,
    ),
    "without_the_setting_nothing_is_touched": (
        "run = loader(stop_on_signals=None)\nprint(signal.getsignal(signal.SIGTERM) is signal.SIG_DFL, flush=True)\nfor _ in run: send()",
        "True",
        -15,
    ),
    "ranks_go_on_and_say_it": (
        "run = loader(shard=(0, 2))\nfor n, _ in enumerate(run): n or send()\nprint(n, run.stop_requested, place(run))", "2 True (1, 0)", 0
    ),
    "another_thread_cannot_ask_for_it": (
        """
def build():
    try: loader()
    except RuntimeError as error: print(error)
thread = threading.Thread(target=build); thread.start(); thread.join()
""",
        "stop_on_signals: Python sets signal handlers in its main thread only: build the loader there",
        0,
    ),
    "a_loop_in_a_thread_stops_too": (
        """
run, seen = loader(), []
def loop():
    for _ in run:
        seen.append(1)
        while len(seen) == 2 and not run.stop_requested: time.sleep(0.01)
thread = threading.Thread(target=loop); thread.start()
while len(seen) < 2: time.sleep(0.01)
send(); thread.join(); print(len(seen), place(run))
""",
        "2 (0, 2)",
        0,
    ),
    "ctrl_c_is_an_exception_that_loses_no_batch": (
        """
signal.signal(signal.SIGINT, signal.default_int_handler)
run = loader(); loop, seen = iter(run), 0
while True:
    try:
        if seen == 2 and send(signal.SIGINT) is None: pass
        next(loop); seen += 1
    except KeyboardInterrupt: print("caught"); seen = 10 * seen
    except StopIteration: break
print(seen, place(run))
""",
        "caught\n23 (1, 0)",
        0,
    ),
    "an_exit_in_a_loop_is_an_exit": ("run = loader()\nfor _ in run: sys.exit(7)", "", 7),
    "an_exit_without_cleaning_up_is_one": ("run = loader()\nfor _ in run: os._exit(8)", "", 8),
    "an_exception_in_a_loop_ends_the_process": ("run = loader()\nfor _ in run: raise ValueError('mine')", "", 1),
    "a_thread_in_a_loop_does_not_hold_the_end_up": (
        """
run = loader()
def loop():
    while True:
        for _ in run: pass
threading.Thread(target=loop, daemon=True).start(); time.sleep(0.2); print("end")
""",
        "end",
        0,
    ),
    "names_may_go_in_any_order": (
        "run = loader(); loop = iter(run); first = next(loop); kept = next(loop); del run; del loop; print(kept['record'].sum() > 0)",
        "True",
        0,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_of_signals_and_exits(tmp_path, name):
    code, printed, status = CASES[name]
    np.arange(50, dtype=np.int64).tofile(tmp_path / "records.bin")
    command = [sys.executable, "-c", BEGIN + code]
    # A shell that starts tests in the background may have them ignore signals.
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == status, done.stdout + done.stderr
    assert done.stdout.strip().startswith(printed) if printed.endswith("thread") else done.stdout.strip() == printed, done
