"""σ: equal states give equal bytes, everything comes back, and nothing is executed."""

from __future__ import annotations

import collections
import dataclasses
import math
import random
import subprocess
import sys
import typing
import unittest
from typing import Any

from fiec import StateError, testing
from fiec.restore import decode
from fiec.sigma import encode

from .support import HAS_NUMPY, HAS_TORCH, NO_NUMPY, NO_TORCH, environment


@dataclasses.dataclass
class Point:
    x: float = 0.0
    tags: list[str] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        if self.x == 99.0:
            raise AssertionError("reading a state executes nothing")


@dataclasses.dataclass(frozen=True)
class Fixed:
    n: int


class Pair(typing.NamedTuple):
    a: int
    b: str


class Box:
    """Saves and loads itself."""

    def __init__(self) -> None:
        self.inner: dict[str, Any] = {"k": [1, 2]}

    def state_dict(self) -> dict[str, Any]:
        return dict(self.inner)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if "k" not in state:
            raise KeyError("k")
        self.inner = state


def whole(value: Any) -> bytes:
    return b"".join(encode(value))


VALUES: list[Any] = [
    None,
    True,
    False,
    0,
    -1,
    127,
    128,
    -129,
    2**200,
    -(2**64),
    0.0,
    -0.0,
    1e-310,
    math.inf,
    1.5 - 2.5j,
    "",
    "grün 🎲",
    "\udc80",
    b"",
    bytes(range(256)) * 40,
    bytearray(b"abc"),
    [],
    [1, [2, [3]]],
    (),
    (1, ("a",)),
    {},
    {"b": 1, "a": 2, 3: None, (1, 2): "t"},
    collections.OrderedDict([("z", 1), ("a", 2)]),
    collections.deque([1, 2, 3], maxlen=5),
    {1, 2, 3},
    frozenset({"x", "y"}),
    Point(1.5, ["a"]),
    Fixed(3),
    Pair(1, "b"),
]


class Values(unittest.TestCase):
    def test_every_kind_of_value_comes_back_with_its_type(self) -> None:
        for value in VALUES:
            with self.subTest(value=value):
                found = decode(whole(value))
                self.assertEqual(type(found), type(value))
                self.assertEqual(found, value)
                self.assertEqual(whole(found), whole(value))
        self.assertEqual(math.copysign(1, decode(whole(-0.0))), -1)
        self.assertEqual(list(decode(whole({"b": 1, "a": 2}))), ["b", "a"])
        self.assertEqual(decode(whole(collections.deque([1], maxlen=5))).maxlen, 5)

    def test_the_format_is_this_one(self) -> None:
        state = {"step": 300, "w": [0.5, None], "t": (True, "é", b"\x00"), "s": {2, 1}}
        self.assertEqual(
            whole(state).hex(),
            "666965630" + "10a6d04730473746570690"
            "22c01730177" + "6c0264000000000000e03f4e" + "730174740354" + "7302c3a9620100"
            "730173" + "5302690101690102",
        )

    def test_a_nan_keeps_its_bits(self) -> None:
        self.assertTrue(math.isnan(decode(whole(math.nan))))
        self.assertEqual(whole(math.nan), whole(decode(whole(math.nan))))

    def test_equal_states_give_equal_bytes_in_any_process(self) -> None:
        code = (
            "import sys; sys.path.insert(0, sys.argv[1]); from fiec.sigma import encode\n"
            "s = {'set': {f'k{n}' for n in range(50)}, 'd': {f'k{n}': n for n in range(50)}}\n"
            "print(b''.join(encode(s)).hex())"
        )
        found = {
            subprocess.run(
                [sys.executable, "-c", code, environment()["PYTHONPATH"]],
                env=environment(PYTHONHASHSEED=str(seed)),
                capture_output=True,
                text=True,
                check=True,
            ).stdout
            for seed in (1, 2, 3)
        }
        self.assertEqual(len(found), 1)
        self.assertTrue(found.pop())

    def test_random_generators_go_on_where_they_were(self) -> None:
        rng = random.Random(7)
        rng.gauss(0, 1)
        twin = decode(whole(rng))
        self.assertEqual([rng.gauss(0, 1) for _ in range(5)], [twin.gauss(0, 1) for _ in range(5)])
        other = random.Random(1)
        self.assertIs(decode(whole(rng), other), other)
        self.assertEqual(other.random(), rng.random())

    def test_objects_of_the_program_are_loaded_in_place(self) -> None:
        box = Box()
        state = {"l": [1, 2], "d": {"a": 1}, "p": Point(2.0, ["x"]), "b": box}
        box.inner["k"].append(3)
        raw = whole(state)
        fresh: dict[str, Any] = {"l": [0], "d": {}, "p": Point(), "b": Box()}
        before = dict(fresh)
        tags = fresh["p"].tags
        self.assertIs(decode(raw, fresh), fresh)
        for name, value in before.items():
            self.assertIs(fresh[name], value, name)
        self.assertIs(fresh["p"].tags, tags)
        self.assertEqual(
            (fresh["l"], fresh["d"], fresh["p"]), ([1, 2], {"a": 1}, Point(2.0, ["x"]))
        )
        self.assertEqual(fresh["b"].inner, {"k": [1, 2, 3]})

    def test_what_cannot_travel_is_named_with_its_place(self) -> None:
        shared = [1]
        loop: list[Any] = []
        loop.append(loop)
        deep: list[Any] = []
        for _ in range(100_000):
            deep = [deep]
        for state, expected in [
            ({"a": [0, object()]}, "state['a'][1]: a builtins:object cannot travel"),
            ({"f": len}, "cannot travel"),
            ({"p": Point(0.0, [typing.cast(str, lambda: 0)])}, "state['p'].tags[0]: a"),
            ({"a": shared, "b": {"c": shared}}, "state['b']['c']: this list is also at another"),
            (loop, "state[0]: this list is also at another"),
            (deep, "nested too deeply"),
            ({"c": collections.Counter("ab")}, "collections:Counter cannot travel"),
        ]:
            with self.subTest(expected=expected), self.assertRaises(StateError) as caught:
                encode(state)
            self.assertIn(expected, str(caught.exception))


class Damage(unittest.TestCase):
    def test_damaged_bytes_are_errors_that_say_so_and_execute_nothing(self) -> None:
        raw = whole({"v": [v for v in VALUES if not isinstance(v, float)], "p": Point(1.0, ["a"])})
        for cut in range(len(raw)):
            with self.assertRaises(StateError, msg=f"cut at {cut}"):
                decode(raw[:cut])
        with self.assertRaisesRegex(StateError, "1 bytes follow"):
            decode(raw + b"N")
        with self.assertRaisesRegex(StateError, "not written by this kit"):
            decode(b"other" + raw)
        seed = random.randrange(2**32)
        draw = random.Random(seed)
        for round in range(3000):
            bad = bytearray(raw)
            for _ in range(draw.randrange(1, 4)):
                bad[draw.randrange(6, len(bad))] = draw.randrange(256)
            try:
                decode(bytes(bad))
            except StateError:
                pass
            except Exception as error:
                self.fail(f"seed {seed} round {round}: {error!r} is no StateError")

    def test_a_class_is_taken_from_loaded_modules_only_and_not_called(self) -> None:
        raw = whole({"p": Point(98.0)})
        self.assertEqual(decode(raw)["p"].x, 98.0)
        never_made = raw.replace(whole(98.0)[6:], whole(99.0)[6:])
        self.assertEqual(decode(never_made)["p"].x, 99.0)
        name = f"{Point.__module__}:Point".encode()
        for other in ("this_module_is_not_there:X", "subprocess:Popen", "os:system"):
            bad = raw.replace(bytes((len(name),)) + name, bytes((len(other),)) + other.encode())
            with self.subTest(other), self.assertRaises(StateError):
                decode(bad)
        self.assertNotIn("this_module_is_not_there", sys.modules)

    def test_a_state_of_another_program_is_named(self) -> None:
        raw = whole({"a": Box(), "b": 1})
        with self.assertRaisesRegex(StateError, r"state\['a'\]: a .*:Box loads itself"):
            decode(raw, {"b": 0})
        bad = Box()
        bad.inner = {"other": 1}
        with self.assertRaisesRegex(StateError, "load_state_dict refuses it: 'k'"):
            decode(whole({"a": bad}), {"a": Box()})


@unittest.skipUnless(HAS_NUMPY, NO_NUMPY)
class Numpy(unittest.TestCase):
    def test_arrays_scalars_and_generators_come_back_bit_by_bit(self) -> None:
        import numpy as np

        rng = np.random.default_rng(1)
        arrays: list[Any] = [
            rng.standard_normal((3, 4, 5)),
            np.asfortranarray(rng.standard_normal((3, 4))),
            np.arange(6, dtype=">i4"),
            np.array(2.5),
            np.zeros((0, 3), dtype=np.float32),
            np.array([True, False]),
            np.array(["a", "bcd"]),
            np.array(["2020-01-01"], dtype="M8[D]"),
            np.array([(1, 2.0)], dtype=[("a", "<i4"), ("b", "<f8")]),
            rng.standard_normal(5).astype(np.complex64),
            np.float32(1.25),
            np.int8(-3),
            np.bool_(True),
        ]
        for a in arrays:
            with self.subTest(a=a):
                b = decode(whole(a))
                self.assertEqual((type(b), b.dtype, b.shape), (type(a), a.dtype, a.shape))
                self.assertEqual(b.tobytes(), a.tobytes())
                if isinstance(a, np.ndarray):
                    self.assertEqual(b.flags.c_contiguous, a.flags.c_contiguous)
                    self.assertTrue(b.flags.writeable and b.flags.owndata)
        for name in ("PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64"):
            g = np.random.Generator(getattr(np.random, name)(3))
            g.standard_normal(3)
            g.integers(0, 10, dtype=np.int32)
            twin = decode(whole(g))
            self.assertEqual(twin.random(4).tobytes(), g.random(4).tobytes(), name)
        legacy = np.random.RandomState(4)
        legacy.standard_normal()
        twin = decode(whole(legacy))
        self.assertEqual(twin.standard_normal(3).tobytes(), legacy.standard_normal(3).tobytes())

    def test_arrays_are_loaded_in_place_and_share_nothing_with_what_was_sent(self) -> None:
        import numpy as np

        w = np.arange(2000.0)
        pieces = encode({"w": w})
        w[:] = -1
        raw = b"".join(pieces)
        v = np.zeros(2000)
        found = decode(raw, {"w": v})
        self.assertIs(found["w"], v)
        self.assertEqual(v[1999], 1999.0)
        grown = decode(raw, {"w": np.zeros(3)})
        self.assertEqual(grown["w"].shape, (2000,))

    def test_what_differs_between_machines_is_refused(self) -> None:
        import numpy as np

        for bad in (np.zeros(2, dtype=np.longdouble), np.array([object()])):
            with self.assertRaises(StateError):
                encode({"w": bad})


@unittest.skipUnless(HAS_TORCH, NO_TORCH)
class Torch(unittest.TestCase):
    def test_tensors_modules_and_optimizers_come_back_bit_by_bit(self) -> None:
        import torch

        for t in (
            torch.randn(3, 4),
            torch.randn(3, 4).t(),
            torch.tensor(2.5),
            torch.zeros(0, 2),
            torch.randn(5).bfloat16(),
            torch.arange(4),
            torch.tensor([True, False]),
        ):
            u = decode(whole(t))
            self.assertEqual((u.dtype, u.shape), (t.dtype, t.shape))
            self.assertTrue(torch.equal(u, t))

        def make() -> dict[str, Any]:
            model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
            adam = torch.optim.AdamW(model.parameters(), lr=0.01)
            return {"m": model, "o": adam, "s": torch.optim.lr_scheduler.StepLR(adam, 2)}

        def step(parts: dict[str, Any]) -> None:
            parts["o"].zero_grad()
            parts["m"](torch.ones(6, 3) * torch.arange(6.0)[:, None]).square().sum().backward()
            parts["o"].step()
            parts["s"].step()

        a = make()
        for _ in range(3):
            step(a)
        raw = whole(a)
        b = decode(raw, make())
        self.assertEqual(whole(b), raw)
        step(a)
        step(b)
        self.assertEqual(whole(a), whole(b))


class Declared(unittest.TestCase):
    """What `run.state` accepts."""

    def test_a_dataclass_is_the_state_itself(self) -> None:
        def main(run: Any) -> Any:
            p = run.state(Point())
            for step in run.steps(6):
                p.x += step
                p.tags.append(str(step))
            return [p.x, p.tags]

        whole_run = testing.run(main)
        self.assertEqual(whole_run.result, [15.0, list("012345")])
        cut = testing.run(main, yield_every=2)
        self.assertEqual((cut.result, cut.runs), (whole_run.result, 4))

    def test_misuse_is_a_failure_that_says_what_to_do(self) -> None:
        def twice(run: Any) -> None:
            run.state(a=1)
            run.state(b=1)

        def frozen(run: Any) -> None:
            run.state(Fixed(1))
            for _ in run.steps(3):
                pass

        def forgotten(run: Any) -> None:
            if not run.resumed:
                run.state(a=1)
            for _ in run.steps(3):
                pass

        def changed(run: Any) -> None:
            run.state(**({"new": 1} if run.resumed else {"old": 1}))
            for _ in run.steps(3):
                pass

        for main, expected in [
            (twice, "called once"),
            (frozen, "not frozen"),
            (forgotten, "call run.state() before the first step"),
            (changed, "boundary 1 has no part new; it has old"),
        ]:
            out = testing.run(main, yield_every=1)
            self.assertEqual(out.ending, "failed", main.__name__)
            self.assertIn(expected, out.reason or "")
