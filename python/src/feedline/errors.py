"""An exception for each kind of feedline's errors. The message is the whole line: path, offset, sample, batch, cause.

All are `feedline.errors.Error`, and the exception of Python that fits, so that `except FileNotFoundError` works as well.
"""

from __future__ import annotations

from typing import ClassVar


class Error(Exception):
    """An error of feedline."""

    kind: ClassVar[str] = ""
    """The kind in words, as the message has it."""

    stage: str = ""
    """The stage of the pipeline: build, read, decode, device and others."""

    need: int | None = None
    """The amount that was needed, if the error compares two: bytes of memory (`BudgetError`), bytes of a read
    (`TruncatedError`), batches (`BatchesHeldError`), bad samples (`BadSamplesError`), or what exceeds a limit (`LimitError`)."""

    have: int | None = None
    """The amount that was there or allowed, in the same unit."""


class ConfigError(Error, ValueError):
    """A setting or argument is illegal; nothing was started."""

    kind = "bad configuration"


class UnsupportedError(Error, RuntimeError):
    """This machine lacks what a setting asks for: io_uring, O_DIRECT, a direct route of cuFile."""

    kind = "not possible on this machine"


class BudgetError(Error, ValueError):
    """The memory budget is below the smallest legal plan."""

    kind = "memory budget too small"


class NotFoundError(Error, FileNotFoundError):
    """A file or folder does not exist, or no longer."""

    kind = "not found"


class AccessError(Error, PermissionError):
    """The operating system or the store refused access."""

    kind = "permission denied"


class NotAFileError(Error, OSError):
    """A path is no regular file, or leaves the dataset's folder."""

    kind = "not a regular file"


class EmptyError(Error, ValueError):
    """There is nothing to read."""

    kind = "empty"


class TruncatedError(Error, OSError):
    """A file ends before the length in its index."""

    kind = "truncated"


class ChangedError(Error, OSError):
    """A file has changed since it was indexed."""

    kind = "changed since it was indexed"


class FingerprintError(Error, ValueError):
    """The dataset is not the one that the run started with."""

    kind = "dataset changed"


class StateError(Error, ValueError):
    """A saved state is damaged, or needs other settings."""

    kind = "state not usable"


class IoError(Error, OSError):
    """The device, file system or store reported an error."""

    kind = "I/O error"


class DecodeError(Error, ValueError):
    """The bytes of a sample cannot be decoded."""

    kind = "cannot decode"


class LimitError(Error, ValueError):
    """A limit was exceeded, checked before memory was taken."""

    kind = "over the limit"


class ShapeError(Error, ValueError):
    """A shape, length or element type does not fit its field."""

    kind = "shape mismatch"


class UserCodeError(Error, RuntimeError):
    """A Python function of the pipeline failed; its exception is the `__cause__`."""

    kind = "user code failed"


class PanickedError(Error, RuntimeError):
    """A decoder or parser panicked."""

    kind = "panicked"


class EpochLiveError(Error, RuntimeError):
    """Another epoch of the loader is alive."""

    kind = "another epoch is alive"


class BatchesHeldError(Error, RuntimeError):
    """Every batch is held, so no further one can be filled."""

    kind = "every batch is held"

    held: dict[str, int] = {}
    """Arrays of each field that are alive, by themselves or by views of them."""


class StalledError(Error, TimeoutError):
    """A read, decode or copy took longer than its deadline."""

    kind = "stalled"


class BadSamplesError(Error, RuntimeError):
    """More samples failed than `substitute` allows."""

    kind = "too many bad samples"


class DeviceError(Error, RuntimeError):
    """The GPU cannot be used."""

    kind = "device not usable"


class CancelledError(Error, RuntimeError):
    """The loader or epoch was shut down."""

    kind = "cancelled"


class ForkedError(Error, RuntimeError):
    """The process was forked after the loader was built."""

    kind = "forked"


#: The class of each kind.
CLASSES: dict[str, type[Error]] = {
    value.kind: value for value in globals().values() if isinstance(value, type) and issubclass(value, Error) and value.kind
}
