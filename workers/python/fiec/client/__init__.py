"""Submit executions to FIEC and get their results, from a program or a notebook.

::

    import fiec.client

    c = fiec.client.connect()                      # the `fiec up` on this machine, or FIEC_NATS_URL
    job = c.run("train.py", {"lr": 1e-3})          # packs, pushes and submits
    for line in job.logs(follow=True):
        print(line)
    w = job.outputs["w.npy"].numpy()               # its digest is checked

    sweep = c.map("walk@1", {"seed": range(100_000)}, batch="study", at_once=64)
    for done in fiec.client.as_completed(sweep, progress=True):
        ...                                        # failures included: done.status()

Executions live in the cluster. Ctrl-C, a lost connection or the end of this program ends none of
them. :mod:`fiec.client.aio` is the same for ``asyncio``.

It needs ``pip install 'fiec[client]'``. The kit for programs needs nothing.
"""

try:
    import blake3 as _blake3  # noqa: F401
    import nats as _nats  # noqa: F401
except ImportError as error:
    raise ImportError(f"fiec.client needs {error.name}: pip install 'fiec[client]'") from error

from .curves import Curve
from .errors import ClientError, Damaged, Missing, NotCompleted, Refused, Unreachable
from .logs import Line
from .status import Status
from .sync import Client, Job, Output, Outputs, Sweep, as_completed, connect

__all__ = [
    "Client",
    "ClientError",
    "Curve",
    "Damaged",
    "Job",
    "Line",
    "Missing",
    "NotCompleted",
    "Output",
    "Outputs",
    "Refused",
    "Status",
    "Sweep",
    "Unreachable",
    "as_completed",
    "connect",
]
