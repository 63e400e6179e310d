"""When a boundary is committed: the same rules as ``workers/kit/src/commit.rs``.

Pure: times are passed in, in seconds.
"""

from __future__ import annotations

import math
from typing import Any

from .errors import FrameError

# Commits that may be unacknowledged at once, for a small state and for a large one.
WINDOW = 4
WINDOW_LARGE = 2
SMALL = 256 * 1024
_AUTO = 1.0
_AUTO_LONGEST = 60.0
# Under `auto`, commits may take one part in so many of the time.
_AUTO_SHARE = 100

NO, COMMIT, COMMIT_WHEN_ACKNOWLEDGED = range(3)


class Schedule:
    """Decides for one execution."""

    def __init__(self, policy: Any, stretch: float, now: float, index: int) -> None:
        self.every: int | None = None
        self._own: float | None = None
        match policy:
            case "auto":
                pass
            case {"every": int(k)} if k > 0 and len(policy) == 1:
                self.every = k
            case {"every_ms": int(t)} if t > 0 and len(policy) == 1:
                self._own = t / 1000
            case _:
                raise FrameError(f"commit policy {policy!r} is not known")
        self._stretch = stretch
        self._cost = 0.0
        self._last = now
        self._next = now + self._interval()
        self._last_index = index
        self.unacknowledged = 0
        self._window = WINDOW_LARGE

    def gate(self) -> float:
        """The first boundary at which a commit may be due whatever the time."""
        return math.inf if self.every is None else self._last_index + self.every

    def stretch(self, interval: float) -> None:
        """Wishes routine commits by time to be at least so many seconds apart."""
        self._stretch = interval
        self._next = self._last + self._interval()

    def _interval(self) -> float:
        own = self._own
        if own is None:
            own = min(max(self._cost * _AUTO_SHARE, _AUTO), _AUTO_LONGEST)
        return max(own, self._stretch)

    def boundary(self, index: int, now: float) -> int:
        """Boundary ``index`` was reached."""
        if self.every is not None:
            if index - self._last_index < self.every:
                return NO
            return COMMIT_WHEN_ACKNOWLEDGED if self.is_full() else COMMIT
        if self.unacknowledged > 0 or now < self._next:
            return NO
        return COMMIT

    def sent(self, index: int, now: float, encoding: float, size: int) -> None:
        """A commit was sent; making its ``size`` bytes of state took ``encoding`` seconds."""
        self._window = WINDOW if size <= SMALL else WINDOW_LARGE
        self._last, self._last_index = now, index
        self.unacknowledged += 1
        self._cost = encoding
        self._next = now + self._interval()

    def acknowledged(self, latency: float) -> None:
        """A commit was acknowledged, no sooner than ``latency`` seconds after it was sent."""
        self.unacknowledged = max(0, self.unacknowledged - 1)
        self._cost += latency
        self._next = self._last + self._interval()

    def is_full(self) -> bool:
        """True when as many commits are unacknowledged as may be."""
        return self.unacknowledged >= self._window
