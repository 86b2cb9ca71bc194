"""Times of steps on a GPU, by events on PyTorch's current stream.

    got ──event──► step's kernels ──event──► asks      idle: from the end of a step to the begin of the next one, on the GPU
"""

from __future__ import annotations

import sys
from collections import deque
from typing import Any


class Steps:
    """Marks begins and ends of steps. Nothing is marked before PyTorch uses a GPU in this process."""

    def __init__(self) -> None:
        self._torch = sys.modules.get("torch")
        self._begins: deque[Any] = deque()
        self._ends: deque[Any] = deque()
        self._begin: Any = None
        self.count = 0
        self.used = False
        self._busy_ms = self._idle_ms = 0.0

    def restart(self) -> None:
        """An epoch starts: the time since the last step is no gap between steps."""
        self._begins.clear()
        self._ends.clear()
        self._begin = None

    def _event(self) -> Any:
        if self._torch is None or not self._torch.cuda.is_initialized():
            return None
        self.used = True
        event = self._torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def begin(self) -> None:
        self._begin = self._event()

    def end(self) -> None:
        if self._begin is None:
            return
        self._begins.append(self._begin)
        self._ends.append(self._event())
        self._begin = None
        self._settle(False)

    def _settle(self, wait: bool) -> None:
        """Adds the steps that the GPU has behind it, all but the last one, whose end the next gap needs."""
        while len(self._ends) > 1:
            following = self._begins[1]
            if wait:
                following.synchronize()
            elif not following.query():
                return
            begun, ended = self._begins.popleft(), self._ends.popleft()
            self._busy_ms += begun.elapsed_time(ended)
            self._idle_ms += max(0.0, ended.elapsed_time(following))
            self.count += 1

    def times(self) -> tuple[int, int, int]:
        """Steps, and nanoseconds: from the first one's begin to the last one's of each epoch, and without a step."""
        self._settle(True)
        return self.count, round(1e6 * (self._busy_ms + self._idle_ms)), round(1e6 * self._idle_ms)
