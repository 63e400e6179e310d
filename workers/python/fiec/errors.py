"""What ends a run before its program returns."""

from __future__ import annotations


class Failed(Exception):
    """Raise it to end the execution: ``raise Failed("params.rate: must be above 0")``.

    By default FIEC does not try again (``permanent=True``). With ``permanent=False``, as with any
    other exception, the attempt has failed and the next one starts from the last commit, until the
    submission's retries are used up.
    """

    def __init__(self, reason: str, *, permanent: bool = True) -> None:
        super().__init__(reason)
        self.reason = reason
        self.permanent = permanent


class StateError(Failed):
    """A state that cannot travel, or bytes that are no state of this program.

    The message names the place in the state, e.g. ``state.model['weights'][3]``.
    """

    def __init__(self, rule: str) -> None:
        super().__init__(rule)
        self.rule = rule
        self._place: list[str] = []

    def within(self, place: str) -> StateError:
        """Names the container around the place found so far."""
        self._place.append(place)
        self.reason = str(self)
        return self

    def __str__(self) -> str:
        return f"state{''.join(reversed(self._place))}: {self.rule}"


class Stop(BaseException):
    """The run has ended at a boundary; the program is being unwound. See the subclasses.

    Not an ``Exception``: ``except Exception`` lets it pass. ``finally`` blocks and context
    managers run as usual. Do not catch it.
    """


class Yielded(Stop):
    """The boundary was handed over to be committed; the computation goes on somewhere else."""


class Cancelled(Stop):
    """The execution was cancelled."""


class Done(Stop):
    """Nothing is left of a range that is shared: what follows its loop is the whole's to do."""


class AgentGone(Stop):
    """The other end of the socket is closed: nobody is left to compute for."""


class FrameError(Exception):
    """Bytes that are no frame, or a frame that says nothing known."""
