"""What the client does without a cluster."""

from __future__ import annotations

import base64
import json
import unittest
from collections.abc import Iterator
from datetime import datetime, timezone
from typing import Any

from fiec.client import arrays, names, page
from fiec.client.curves import of_rows
from fiec.client.logs import Line, Lines
from fiec.client.status import Status, of_message


class Names(unittest.TestCase):
    def test_an_execution_has_the_uuid_that_all_of_fiec_computes(self) -> None:
        known = "5776c0fe-ded0-80c4-a785-bf81c5d2553f"
        self.assertEqual(names.execution("default", "x-1"), known)
        self.assertEqual(names.execution("default", known.upper()), known)
        for wrong in ("", ".x", "a b", "x" * 129, "ä"):
            with self.assertRaises(ValueError):
                names.execution("default", wrong)


def pieces(found: Iterator[arrays.Array]) -> list[tuple[Any, ...]]:
    return [(a.line["id"], a.line["array"], a.line["params"], list(a.params)) for a in found]


class Arrays(unittest.TestCase):
    def test_a_range_is_an_array_of_indices(self) -> None:
        cut = pieces(arrays.cut("s", {"seed": range(3)}, {"lr": 1}, {}))
        params = [{"lr": 1, "seed": n} for n in range(3)]
        self.assertEqual(cut, [("s", {"count": 3}, {"lr": 1, "seed": "{index}"}, params)])
        (array,) = arrays.cut("s", {"seed": range(5, 12, 3)}, {}, {"batch": "b"})
        self.assertEqual(array.line["array"], {"from": 5, "to": 11, "step": 3})
        self.assertEqual(array.line["batch"], "b")
        self.assertEqual(array.names, ["s-5", "s-8", "s-11"])
        self.assertEqual(array.params[1:], [{"seed": 8}, {"seed": 11}])

    def test_other_parameters_are_an_array_of_values(self) -> None:
        over: dict[str, list[Any]] = {"lr": [0.1, 0.2], "net": ["a", "b"]}
        ((id, array, params, each),) = pieces(arrays.cut("s", over, {"steps": 2}, {}))
        self.assertEqual(id, "s")
        self.assertEqual(params, {"steps": 2, "lr": "{value.lr}", "net": "{value.net}"})
        self.assertEqual(array["values"][1], {"lr": 0.1, "net": "b"})
        self.assertEqual(each[3], {"steps": 2, "lr": 0.2, "net": "b"})
        for numbers in (range(0), range(-1, 3), range(3, 0, -1)):
            if numbers:
                ((_, array, _, _),) = pieces(arrays.cut("s", {"n": numbers}, {}, {}))
                self.assertEqual([v["n"] for v in array["values"]], list(numbers))
            else:
                with self.assertRaises(ValueError):
                    list(arrays.cut("s", {"n": numbers}, {}, {}))
        with self.assertRaises(ValueError):
            list(arrays.cut("s", [{"a": 1}, {"b": 1}], {}, {}))

    def test_values_that_are_no_list_are_refused_by_name(self) -> None:
        for value in (0.3, "fast", None):
            wrong: Any = {"seed": range(2), "damping": value}
            with self.assertRaisesRegex(ValueError, "damping is .* no list of values.* params"):
                list(arrays.cut("s", wrong, {}, {}))

    def test_what_is_too_long_for_a_line_becomes_several(self) -> None:
        over = [{"text": "x" * 1000, "n": n} for n in range(2000)]
        cut = list(arrays.cut("s", over, {}, {}))
        self.assertGreater(len(cut), 3)
        self.assertEqual([a.line["id"] for a in cut[:2]], ["s.0", "s.1"])
        self.assertEqual(cut[1].names[0], "s.1-0")
        self.assertEqual([p["n"] for a in cut for p in a.params], list(range(2000)))
        for array in cut:
            self.assertLess(len(json.dumps(array.line)), 512 * 1024)


def piece(line: str, offset: int, **more: Any) -> bytes:
    head = {"node": "n1", "epoch": 1, "stream": "stdout", "boundary": 2, "at": "now"}
    return json.dumps({**head, "line": line, "offset": offset, **more}).encode()


class Logs(unittest.TestCase):
    def lines(self, *data: bytes) -> list[Line]:
        joined = Lines()
        found = [line for one in data for line in joined.add(one)]
        return found + joined.rest()

    def test_parts_are_joined_and_what_comes_twice_is_shown_once(self) -> None:
        found = self.lines(
            piece("ab", 0, part=True),
            piece("cd", 2),
            piece("cd", 2),
            piece("50%\r100%", 5),
            piece("end", 14, part=True),
        )
        self.assertEqual([line.text for line in found], ["abcd", "100%", "end"])
        self.assertEqual((found[0].node, found[0].boundary, found[0].missing), ("n1", 2, 0))
        self.assertEqual((found[2].node, found[2].boundary, found[2].at), ("n1", 2, "now"))

    def test_what_is_missing_and_what_is_no_text_is_said(self) -> None:
        found = self.lines(
            piece("late", 10),
            piece("dropped", 15, dropped={"lines": 1, "bytes": 7}),
            piece("?", 22, bytes=base64.b64encode(b"\xff").decode()),
            b"no json",
            b"{}",
        )
        self.assertEqual([(x.text, x.missing) for x in found], [("late", 10), ("\\xff", 7)])

    def test_each_binding_and_stream_has_lines_of_its_own(self) -> None:
        found = self.lines(
            piece("a", 0, part=True), piece("b", 0, stream="stderr"), piece("c", 0, epoch=2)
        )
        self.assertEqual([line.text for line in found], ["b", "c", "a"])


class Shown(unittest.TestCase):
    def test_no_text_of_a_program_is_markup(self) -> None:
        at = datetime(2026, 1, 1, tzinfo=timezone.utc)
        placement = {
            "node": "<n>",
            "cause": "<c>",
            "epoch": 1,
            "bound_at": at,
            "ended_at": None,
            "end_reason": "<r>",
        }
        points = [
            {"name": "<s>", "boundary": n, "value": v, "lowest": v, "highest": v}
            for n, v in enumerate([1.0, float("nan"), 3.0])
        ]
        status = Status("started", "<n>", 3, 9, "<note>", "<why>")
        seen = page.Seen("<id>", status, [placement], of_rows(points), "<notice>")
        shown = page.of_job(seen)
        for text in ("id", "n", "c", "r", "s", "note", "why", "notice"):
            self.assertNotIn(f"<{text}>", shown)
            self.assertIn(f"&lt;{text}&gt;", shown)
        self.assertIn("boundary 3 of 9", shown)
        self.assertIn("2 executions", page.of_counts("x", {"completed": 1, "failed": 1}))

    def test_a_message_of_a_ledger_says_how_it_stands(self) -> None:
        state = {"phase": {"is": "failed"}, "boundary": {"index": 4}}
        failed = of_message({"state": state, "events": [{"type": "failed", "reason": "no"}]})
        self.assertEqual((failed.ended, failed.reason, failed.boundary), (True, "no", 4))
        running = of_message(
            {"state": {"phase": {"is": "started", "node": "n1"}}},
            {"boundary": 7, "of": 9, "note": "so far"},
        )
        self.assertEqual((running.node, running.boundary, running.of), ("n1", 7, 9))


if __name__ == "__main__":
    unittest.main()
