"""Examples are imported by tests."""

import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "examples" / "pytorch"), str(ROOT / "python" / "examples")]


def eventually(holds, seconds=60):
    """Whether it holds soon. The kernel lists a thread for a moment after it was joined."""
    end = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True
