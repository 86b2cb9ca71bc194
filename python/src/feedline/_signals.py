"""SIGTERM and SIGUSR1 for the setting `stop_on_signals`, while a loader wants them.

    first loader ──► our handler ──► every loader that wants it, then the earlier handler of Python
    last one gone ──► the handlers that were there before
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import weakref
from typing import Any, Callable

_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
# By the loader's id; 0 is one that is being built.
_wanting: dict[int, Callable[[], Any]] = {}
# For each signal Python's handler before ours, and the kernel's: one in C is unknown to Python.
_before: dict[int, tuple[Any, Any]] = {}
_came = False


def install() -> None:
    """Takes the signals, before a loader is built that wants them: `watch` or `release` follows."""
    global _came
    if threading.current_thread() is not threading.main_thread():
        raise RuntimeError("stop_on_signals: Python sets signal handlers in its main thread only: build the loader there")
    if not _before:
        _came = False
        for number in _SIGNALS:
            action = _action(number)
            _before[number] = (signal.signal(number, _handle), action)
    _wanting[0] = lambda: None


def watch(loader: Any) -> None:
    """Has signals stop this loader until it is gone; also those that came while it was built."""
    key = id(loader)
    _wanting[key] = weakref.ref(loader, lambda _: release(key))
    release(0)
    if _came:
        loader._request_stop()


def release(key: int) -> None:
    """A loader is gone, or was not built."""
    _wanting.pop(key, None)
    if not _wanting and threading.current_thread() is threading.main_thread():
        _restore()


def _in_child() -> None:
    # A forked child has no loader yet: it ends by these signals as others do.
    _wanting.clear()
    _restore()


os.register_at_fork(after_in_child=_in_child)


def _action(number: int, new: Any = None) -> Any:
    """The kernel's handler of a signal; with `new` sets it."""
    # Larger than every libc's struct sigaction.
    old = ctypes.create_string_buffer(512)
    ctypes.CDLL(None).sigaction(ctypes.c_int(number), new, None if new else old)
    return old


def _handle(number: int, frame: Any) -> None:
    global _came
    _came = True
    for wanting in list(_wanting.values()):
        if (loader := wanting()) is not None:
            loader._request_stop()
    earlier = _before.get(number, (None,))[0]
    if not _wanting and _before:
        # The last loader went in another thread, which cannot set handlers.
        _restore()
        os.kill(os.getpid(), number)
    elif callable(earlier):
        earlier(number, frame)


def _restore() -> None:
    for number, (handler, action) in _before.items():
        # One that was set after ours stays.
        if signal.getsignal(number) is _handle:
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
            _action(number, action)
    _before.clear()
