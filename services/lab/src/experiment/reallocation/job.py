"""A job of `fiec experiment reallocation`, over JSON lines. It sleeps for the time that its device
would compute, and holds the memory of the device that it needs.

Its device is emulated. `params.devices` has a folder for each device. Every process that computes
there keeps a file with its memory in that folder; `memory` has the size of the device in GiB. A file
counts while its process keeps it locked, so a killed process holds nothing. Readers and writers hold
`lock`. Processes on one device share its units evenly if they want more than all of them.

The state is the number of finished capsules, and a number that each capsule changes. Each event is a
line in `params.log`: `began`, `capsule`, `oom` or `left`, the process, the finished capsules, and the
device.
"""

import base64
import fcntl
import json
import os
import socket
import sys
import time

GIB = 1 << 30
# Time in seconds after which a process that leaves a device has left it.
PATIENCE_S = 2.0
# Factor by which a job slows down if it has less memory than it needs.
SLOWER = 4.0
# Number of capsules after which a job repeats a request without effect.
ASK_AGAIN = 10


class Device:
    """A part of an emulated device, or no device."""

    def __init__(self, devices, units):
        self.devices, self.units = devices, units
        self.id, self.file, self.held = None, None, 0

    def go(self, name):
        """Leaves the current device and joins the device of this name, if any."""
        if self.file is not None:
            os.unlink(self.path)
            os.close(self.file)
        self.id, self.file, self.held = name, None, 0
        if name is not None:
            self.folder = os.path.join(self.devices, name)
            with open(os.path.join(self.folder, "memory")) as file:
                self.memory = int(file.read())
            self.path = os.path.join(self.folder, "of-%d" % os.getpid())
            with self.alone():
                self.file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
                fcntl.flock(self.file, fcntl.LOCK_EX)
                self.write(0, 0)

    def alone(self):
        lock = open(os.path.join(self.folder, "lock"), "a")
        fcntl.flock(lock, fcntl.LOCK_EX)
        return lock

    def write(self, held, used):
        text = json.dumps({"held": held, "used": used, "units": self.units}).encode()
        os.ftruncate(self.file, 0)
        os.pwrite(self.file, text, 0)

    def others(self):
        """Returns the memory of the other live processes, and the units that they want."""
        held, units = 0, 0.0
        for entry in os.scandir(self.folder):
            if not entry.name.startswith("of-") or entry.path == self.path:
                continue
            try:
                with open(entry.path) as file:
                    try:
                        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                    except BlockingIOError:
                        said = json.load(file)
                        held, units = held + said["held"], units + said["units"]
                        continue
                    os.unlink(entry.path)
            except FileNotFoundError:
                pass
        return held, units

    def hold(self, held, used, patience=0.0):
        """Holds `held` GiB from now on. Returns False if the device has too little."""
        until = time.monotonic() + patience
        while True:
            with self.alone():
                if held <= self.held or self.others()[0] + held <= self.memory:
                    self.write(held, used)
                    self.held = held
                    return True
            if time.monotonic() >= until:
                return False
            time.sleep(0.02)

    def slowness(self):
        with self.alone():
            return max(1.0, self.units + self.others()[1])


class Job:
    def __init__(self):
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.connect(os.environ["FIEC_SOCKET"])
        self.lines = self.socket.makefile("r", encoding="utf-8")
        run = self.hear()
        self.params = run["params"]
        self.done, self.number = 0, self.params["seed"]
        if run["state"] is not None:
            state = json.loads(base64.b64decode(run["state"]))
            self.done, self.number = state["done"], state["number"]
        log = os.path.join(self.params["log"], run["execution"])
        self.journal = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self.device = Device(self.params["devices"], self.params["units"])
        self.asked = None
        self.began = False
        self.grant(run["grant"])
        self.due = time.monotonic()

    def hear(self):
        line = self.lines.readline()
        if not line:
            sys.exit("the connection was closed")
        return json.loads(line)

    def say(self, **line):
        self.socket.sendall(json.dumps(line).encode() + b"\n")

    def note(self, what):
        line = "%s %d %d %s\n" % (what, os.getpid(), self.done, self.device.id or "-")
        os.write(self.journal, line.encode())

    def needs(self):
        return self.params["peak" if self.done >= self.params["grows_at"] else "base"]

    def may(self):
        """Returns the GiB that the job takes."""
        if self.params["mode"] == "reserved":
            return self.params["peak"]
        if self.params["mode"] == "over_commit":
            return self.needs()
        return min(self.needs(), self.granted)

    def grant(self, grant):
        """Joins the device of a grant, if it is another one."""
        device = grant.get("device")
        name = device and device["uuid"]
        self.granted = (device and device.get("memory_bytes") or 0) // GIB
        if name == self.device.id:
            return
        self.device.go(name)
        if not self.began:
            self.note("began")
            self.began = True
        if name is not None and not self.take(PATIENCE_S):
            self.out_of_memory()

    def take(self, patience=0.0):
        held = self.may()
        return self.device.hold(held, min(held, self.needs()), patience)

    def out_of_memory(self):
        self.note("oom")
        sys.exit("out of memory: %d GiB are not free on %s" % (self.may(), self.device.id))

    def ask(self):
        """Requests the memory that it needs beyond its grant."""
        if self.asked is not None and self.done < self.asked + ASK_AGAIN:
            return
        self.asked = self.done
        self.say(**{"is": "reserve", "device_memory_bytes": self.needs() * GIB})
        self.hear()

    def capsule(self):
        if self.params["mode"] == "reconfigured" and self.needs() > self.granted:
            self.ask()
        # All jobs respect grants, so another job is about to return memory beyond its own.
        asks = self.params["mode"] == "reconfigured"
        if not self.take(PATIENCE_S if asks else 0.0):
            self.out_of_memory()
        slower = SLOWER if self.needs() > self.device.held else 1.0
        step = self.params["capsule_s"] * self.device.slowness() * slower
        # A device computes while its host communicates, but it does not catch up after a long pause.
        self.due = max(self.due, time.monotonic() - self.params["capsule_s"]) + step
        time.sleep(max(0.0, self.due - time.monotonic()))
        self.number = (self.number * 6364136223846793005 + 1442695040888963407) % (1 << 64)
        self.done += 1
        self.note("capsule")

    def boundary(self):
        """Reports a boundary. Returns False if the job ends here."""
        self.say(**{"is": "boundary", "of": self.params["capsules"]})
        while True:
            told = self.hear()
            if told["is"] == "go":
                return True
            if told["is"] == "state":
                state = json.dumps({"done": self.done, "number": self.number}).encode()
                self.say(**{"is": "state", "state": base64.b64encode(state).decode()})
            elif told["is"] == "reconfigure":
                self.asked = None
                self.grant(told["grant"])
            else:
                self.note("left")
                return False

    def run(self):
        while True:
            self.capsule()
            if self.done >= self.params["capsules"]:
                break
            if not self.boundary():
                return
        self.note("left")
        self.device.go(None)
        self.say(**{"is": "completed", "result": {"digest": "%016x" % self.number, "capsules": self.done}})


Job().run()
