"""Values at the edge of JSON: carried or refused in a sentence, equal with and without a worker."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import unittest
from typing import Any

from fiec import Failed, testing

from .programs import values
from .support import HAS_NUMPY, NO_NUMPY, PROGRAMS, Child, environment
from .test_local import Folder

# (to, which, the sentence)
REFUSED = (
    (None, "big", "result.v: an integer has 64 bits at most, but this is 18446744073709551616"),
    (None, "small", "result.v: an integer has 64 bits at most, but this is -9223372036854775809"),
    (None, "surrogate", r"result.v: no text, since it has the lone surrogate '\udc80'"),
    (None, "surrogate_key", r"result.v: a key is no text, since it has the lone surrogate"),
    (None, "keys", "result.v: the key '1' is there twice"),
    (None, "cycle", "is nested more than 100 deep"),
    (None, "bytes", "result.v is a bytes, which JSON cannot say"),
    ("emit", "big", "message 'm'.v: an integer has 64 bits at most"),
    ("emit", "surrogate", "message 'm': no text, since it has the lone surrogate"),
    ("of", "float", "progress: of must be a whole number from 0 to 18446744073709551615"),
    ("of", "big", "progress: of must be a whole number from 0 to 18446744073709551615"),
    ("of", "boolean", "progress: of must be a whole number"),
    ("number", "surrogate", "progress: loss must be a number, but is"),
    ("number", "keys", "progress: loss must be a number, but is"),
    ("output", "surrogate", "output 'o': no text, since it has the lone surrogate"),
    ("name", "surrogate", r"output 'a\udc80': a name is no text, since it has the lone surrogate"),
    ("reserve", "float", "reserve: memory_bytes must be a whole number from 0 to"),
    ("reserve", "negative", "reserve: memory_bytes must be a whole number from 0 to"),
    ("ask", "big", "ask: threads must be a whole number from 0 to 4294967295"),
    ("fail", "surrogate", r"no file a\udc80"),
)
CARRIED = (
    ("nan", "NaN"),
    ("inf", "Infinity"),
    ("edges", [2**64 - 1, -(2**63), 5e-324, -0.0, "a\0b"]),
)


class Values(Folder):
    def start_with(self, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
        """A local run with these words."""
        return subprocess.run(
            [sys.executable, str(PROGRAMS / "values.py"), *words],
            cwd=self.cwd,
            env=environment(**env),
            capture_output=True,
            text=True,
            errors="surrogateescape",
        )

    def params(self, to: str | None, which: str) -> dict[str, Any]:
        return {"which": which} | ({"to": to} if to else {})

    def test_a_value_that_json_cannot_say_is_refused_in_one_sentence_under_a_worker(self) -> None:
        for to, which, sentence in REFUSED:
            with self.subTest(to=to, which=which), Child("values.py") as child:
                child.run(self.params(to, which))
                failed = child.finish()[-1]
                self.assertEqual((failed.kind, failed.head.get("permanent")), ("failed", True))
                self.assertIn(sentence, failed.head["reason"])
                self.assertNotIn("Traceback", child.said())

    def test_and_in_the_same_sentence_without_a_worker(self) -> None:
        for to, which, sentence in REFUSED:
            with self.subTest(to=to, which=which):
                words = [f"{k}={v}" for k, v in self.params(to, which).items()]
                done = self.start_with(*words, "--fresh")
                self.assertEqual(done.returncode, 65, done.stderr)
                self.assertIn(sentence, done.stderr)
                self.assertNotIn("Traceback", done.stderr)
                outcome = testing.run(values.main, self.params(to, which))
                self.assertEqual(outcome.ending, "failed")
                self.assertIn(sentence, str(outcome.reason))

    def test_what_is_carried_is_the_same_everywhere(self) -> None:
        for which, value in CARRIED:
            with self.subTest(which=which), Child("values.py") as child:
                child.run({"which": which})
                found = child.finish()[-1].head["result"]["v"]
                self.assertEqual(json.dumps(found), json.dumps(value))
                done = self.start_with(f"which={which}", "--fresh")
                self.assertEqual(done.returncode, 0, done.stderr)
                (file,) = (self.cwd / ".fiec" / "values").glob("*/result.json")
                local = json.loads(file.read_text())["result"]["v"]
                self.assertEqual(json.dumps(local), json.dumps(value))
                file.unlink()

    @unittest.skipUnless(HAS_NUMPY, NO_NUMPY)
    def test_values_of_numpy_keep_their_numbers(self) -> None:
        import numpy as np

        def main(run: Any) -> object:
            for _ in run.steps(np.int64(2)):
                run.progress(of=np.uint8(3))
            return {"most": np.uint64(2**64 - 1), "losses": np.array([np.nan, 0.1, -np.inf])}

        outcome = testing.run(main, {"n": np.int32(7)})
        self.assertEqual(outcome.reason, None)
        self.assertEqual(
            json.dumps(outcome.result),
            '{"most": 18446744073709551615, "losses": ["NaN", 0.1, "-Infinity"]}',
        )

    def test_a_note_and_a_reason_show_what_is_no_text(self) -> None:
        with Child("values.py") as child:
            child.run({"which": "surrogate", "to": "note"}, commit={"every": 1})
            notes = [r.head["note"] for r in child.finish() if r.kind == "boundary"]
            self.assertEqual(notes, [r"a\udc80"] * 2)
        with Child("values.py") as child:
            child.run({"which": "surrogate", "to": "crash"})
            self.assertIn(r"no file a\udc80", child.finish()[-1].head["reason"])

    def test_parameters_that_a_cluster_refuses_are_refused_here(self) -> None:
        for word, sentence in (
            ("v=NaN", "params.v: NaN is no JSON"),
            ("v=[1e400]", "params.v[0]: Infinity is no JSON"),
            ("v=-Infinity", "params.v: -Infinity is no JSON"),
            (f"v={2**70 + 1}", "params.v: an integer has 64 bits at most"),
            (r'v="\udc80"', r"params.v: no text, since it has the lone surrogate '\udc80'"),
        ):
            for check in ((), ("--check",)):
                with self.subTest(word=word, check=check):
                    done = self.start_with(word, *check)
                    self.assertEqual(done.returncode, 65, done.stderr)
                    self.assertIn(sentence, done.stderr)
                    self.assertNotIn("Traceback", done.stderr)
        (self.cwd / "params.json").write_text('{"v": NaN}')
        done = self.start_with("--params", "params.json")
        self.assertEqual(done.returncode, 65, done.stderr)
        self.assertIn("params.v: NaN is no JSON", done.stderr)
        with self.assertRaisesRegex(Failed, "params.v: NaN is no JSON"):
            testing.run(values.main, {"v": float("nan")})

    def test_a_parameter_is_utf_8_in_any_locale(self) -> None:
        done = self.start_with(
            "v=Zürich", LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0", PYTHONIOENCODING=""
        )
        self.assertEqual(done.returncode, 0, done.stderr)
        (file,) = (self.cwd / ".fiec" / "values").glob("*/params.json")
        self.assertEqual(json.loads(file.read_text(encoding="utf-8")), {"v": "Zürich"})
        done = self.start_with(os.fsdecode(b"v=\xff"))
        self.assertEqual(done.returncode, 2, done.stderr)
        self.assertIn("is not UTF-8", done.stderr)


if __name__ == "__main__":
    unittest.main()
