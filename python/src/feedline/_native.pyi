from collections.abc import Sequence
from typing import Any, final

from typing_extensions import Self, disjoint_base

from ._tensors import Batch

__all__ = ["Epoch", "Loader", "Tensor", "_bound", "_cores", "_enter", "_leave", "_used_on", "_xla_handler", "_xla_stream", "__version__", "ramp", "state_at",
           "state_trained"]

__version__: str

def _enter() -> None: ...
def _leave() -> None: ...
def _cores() -> int: ...
def _bound(address: int) -> list[tuple[int, str]] | None: ...
def _used_on(address: int, stream: Any) -> bool: ...
def _xla_handler() -> Any: ...
def _xla_stream(device: int) -> int | None: ...
def ramp(start: int, end: int, before: Sequence[float], after: Sequence[float]) -> list[tuple[int, list[float]]]:
    """Segments of a linear ramp for `schedule`: at most 64 steps over the positions from `start` to `end`, then `after`."""

def state_at(state: bytes, samples: int) -> bytes:
    """`state` after `samples` more samples were trained."""

def state_trained(state: bytes, epoch: int, batch: int) -> bytes:
    """`state` after one more batch was trained."""


@disjoint_base
class Loader:
    def __new__(cls, source: str, path: str | list[str], **settings: Any) -> Self: ...
    def epoch(self, epoch: int | None = None) -> Any: ...
    def state(self, epoch: int | None = None, advance: int = 0) -> bytes:
        """Where the run stands, after the last batch received, or `advance` batches into `epoch`: bytes (under 1 KiB)."""

    def resume(self, state: bytes, rebatched: bool = False) -> None:
        """Goes on from what `state()` gave; `rebatched`: with another global batch or `last_batch`."""

    def arrive(self) -> None:
        """Says that this rank's own part of a step is done, and that it waits for the other ranks from here on: before the first
        collective operation of each step, for `across`. On a GPU it has no effect.
        """

    def mark(self, stream: Any = None) -> None:
        """On a GPU, says that all work of a step was given to `stream`, or else to the stream that took the last batch, so that
        the report tells how long this program leaves it idle. `feedline.torch` calls it after each step of an optimizer.
        """

    def report(self) -> str:
        """What the loader did so far and what limits it."""

    def log(self, prefix: str = "feedline/") -> dict[str, float]:
        """Scalars of the time since the last call, for a training log. Meant for every step.

        `seconds` in which an epoch was open, without pauses for an evaluation, `samples_per_s`, `starved_share` (time without a
        ready batch; on a GPU of its stream), `host_late_share` (on a GPU: its stream ran dry because of this program),
        `wait_p99_s`, `read_bytes_per_s`, `from_memory_share` (bytes that no device read), `decode_busy_share` and
        `map_batch_busy_share` (of the workers' time), and `bad_samples` (rows for which others stood in). A value that was not
        measured is left out. `epoch_repeated` and `epoch_left_out` are exact before the first batch: rows of a whole epoch of all
        ranks that repeat a sample to fill up a batch, and samples that are dropped.

            wandb.log(loader.log(), step=step)  # or mlflow.log_metrics(loader.log(), step=step)
            for name, value in loader.log().items():
                writer.add_scalar(name, value, step)  # TensorBoard
        """

    def metrics(self, name: str = "train") -> str:
        """The totals so far as text for Prometheus, with `name` as label."""

    def trace(self, name: str = "train") -> str:
        """The last batches and the work of each thread as JSON for ui.perfetto.dev."""

    @staticmethod
    def _agree(processes: list[tuple[int, int, bytes, list[int]]]) -> None: ...
    def _beside(self, shard: tuple[int, int], device: str) -> Loader: ...
    def _check_fork(self) -> None: ...
    def _next_ids(self) -> list[int]: ...
    def _skip(self, epoch: int, start: int, stop: int) -> None: ...
    @property
    def _batch_sizes(self) -> tuple[int, int]: ...
    def _lengths(self, name: str) -> bytearray: ...
    def _picture_sizes(self, name: str, file: str) -> bytearray: ...
    def _reweight(self, weights: Sequence[float]) -> None: ...
    def _preview(self, epoch: int, count: int) -> list[int]: ...
    def _request_stop(self) -> None: ...
    @staticmethod
    def _launched() -> tuple[int, int]: ...
    def _estimate(self, step_s: float) -> tuple[str, str] | None: ...
    def _snapshot(self) -> str: ...
    def _rank_report(self, process: int, processes: int) -> str: ...
    @staticmethod
    def _across(reports: list[str]) -> tuple[str, str]: ...
    def _verdict(self) -> tuple[str, str]: ...
    def _what_if(self, change: str) -> str | None: ...
    def bad_samples(self) -> list[dict[str, Any]]:
        """The samples that could not be had and that others stand in for so far."""

    def spec(self) -> list[tuple[str, str, tuple[int, ...]]]:
        """The fields of a batch: (name, element type, shape of one row)."""

    def varies(self, name: str) -> bool:
        """Whether the lengths of a field vary: then the batch has them under `name + ".lens"`."""

    @property
    def device(self) -> str:
        """Where batches are handed out: "cpu" or "cuda:N"."""

    @property
    def next_epoch(self) -> int:
        """The epoch of the batch that comes next."""

    @property
    def samples_per_epoch(self) -> int:
        """Samples of an epoch, of all ranks together."""

    @property
    def shard(self) -> tuple[int, int]:
        """Rank and world."""

    @property
    def stop_requested(self) -> bool:
        """Whether a signal of `stop_on_signals` arrived: finish the step, save, and leave."""

    def __len__(self) -> int:
        """Batches of one epoch."""

@final
class Epoch:
    def __iter__(self) -> Epoch: ...
    def __next__(self) -> Batch: ...
    def __len__(self) -> int: ...
    @property
    def _received(self) -> tuple[int, int] | None: ...
    def close(self) -> None: ...
    def __enter__(self) -> Epoch: ...
    def __exit__(self, *_error: object) -> None: ...

@final
class Tensor:
    """An array of a batch. `torch.from_dlpack(t)` or `numpy.from_dlpack(t)` makes it theirs, without a copy and once."""

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...
    def bind(self, stream: Any) -> None: ...
    def used_on(self, stream: Any) -> None: ...
    def _take(self, stream: Any) -> None: ...
    @property
    def taken(self) -> bool: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> str: ...
