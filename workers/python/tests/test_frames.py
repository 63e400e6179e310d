"""Frames of any size are read whole, in memory that they get once."""

from __future__ import annotations

import random
import resource
import socket
import threading
import unittest

from fiec.errors import AgentGone
from fiec.frames import SocketLink

from .support import frame

SEED = 20261129


class Large(unittest.TestCase):
    def setUp(self) -> None:
        self.theirs, ours = socket.socketpair()
        self.link = SocketLink(ours)
        self.addCleanup(self.theirs.close)

    def send(self, *parts: bytes) -> None:
        def work() -> None:
            for part in parts:
                self.theirs.sendall(part)

        thread = threading.Thread(target=work)
        thread.start()
        self.addCleanup(thread.join)

    def test_a_large_body_that_arrives_in_pieces_is_followed_by_the_next_frame(self) -> None:
        draw = random.Random(SEED)
        body = draw.randbytes(9_000_001)
        sent = frame({"is": "run"}, body) + frame({"is": "cancel"}, b"abc")
        cuts = sorted(draw.randrange(len(sent)) for _ in range(20))
        self.send(*(sent[a:b] for a, b in zip([0, *cuts], [*cuts, len(sent)])))
        self.assertEqual(self.link.read(), ({"is": "run"}, body), f"seed {SEED}")
        self.assertEqual(self.link.read(), ({"is": "cancel"}, b"abc"))

    def test_a_body_takes_its_memory_once(self) -> None:
        size = 200 << 20
        piece = bytes(1 << 20)
        head = frame({"is": "x"})
        prefix = head[:4] + size.to_bytes(8, "little") + head[12:]
        self.send(prefix, *[piece] * (size // len(piece)))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        got = self.link.read()
        assert got is not None
        self.assertEqual(len(got[1]), size)
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
        self.assertLess(grown, 1.3 * size)

    def test_an_agent_that_dies_in_a_large_body_is_gone(self) -> None:
        self.theirs.sendall(frame({"is": "run"}, bytes(8 << 20))[: 1 << 16])
        self.theirs.close()
        with self.assertRaises(AgentGone):
            self.link.read()


if __name__ == "__main__":
    unittest.main()
