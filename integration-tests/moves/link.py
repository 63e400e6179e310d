"""A link between this host and a new network namespace, with the delay and loss that it is told.

Many kernels lack the queueing discipline that delays packets, so this process carries them itself:
what the kernel sends into a TUN device here comes out of one there, later or not at all. TCP above
it is the kernel's, with its own retransmissions. The namespace and both devices end with this
process, however that ends; it ends at the end of its standard input.

    link.py NUMBER SEED     NUMBER: which of 32768 pairs of addresses in 198.18.0.0/15

Its first line of output is {"pid": its own, "outside": address, "inside": address}; a line of
input {"delay_ms": one way, "loss": share of packets, each way} is answered with "ok" in force.
"""

import ctypes
import fcntl
import heapq
import ipaddress
import json
import os
import random
import select
import socket
import struct
import sys
import time

TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 0x1
SIOCSIFADDR, SIOCSIFDSTADDR = 0x8916, 0x8918
CLONE_NEWNET = 0x40000000
# Packets under way at most, as a router's memory is bounded too.
MOST = 10_000
PACKET = 65_536


def tun(name):
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TUN | IFF_NO_PI))
    return device


def up(name, own=None, peer=None):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        for request, address in ((SIOCSIFADDR, own), (SIOCSIFDSTADDR, peer)):
            if address:
                packed = struct.pack("=HH4s8x", socket.AF_INET, 0, address.packed)
                fcntl.ioctl(control, request, struct.pack("16s16s8x", name.encode(), packed))
        there = fcntl.ioctl(control, SIOCGIFFLAGS, struct.pack("16sH22x", name.encode(), 0))
        flags = struct.unpack("16sH22x", there)[1] | IFF_UP
        fcntl.ioctl(control, SIOCSIFFLAGS, struct.pack("16sH22x", name.encode(), flags))


def say(line):
    print(line, flush=True)


def main(number, seed):
    first = ipaddress.ip_address("198.18.0.0") + 4 * (number % 32768)
    outside, inside = first + 1, first + 2
    name = f"fiec{number % 32768}"
    here = tun(name)
    up(name, outside, inside)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "cannot make a network namespace")
    there = tun(name)
    up(name, inside, outside)
    up("lo")
    say(json.dumps({"pid": os.getpid(), "outside": str(outside), "inside": str(inside)}))

    chance, delay, loss = random.Random(seed), 0.0, 0.0
    waiting, count = [], 0
    orders = b""
    while True:
        pause = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        readable, _, _ = select.select([0, here, there], [], [], pause)
        for source, target in ((here, there), (there, here)):
            while source in readable:
                try:
                    packet = os.read(source, PACKET)
                except BlockingIOError:
                    break
                if len(waiting) < MOST and chance.random() >= loss:
                    count += 1
                    heapq.heappush(waiting, (time.monotonic() + delay, count, target, packet))
        while waiting and waiting[0][0] <= time.monotonic():
            _, _, target, packet = heapq.heappop(waiting)
            try:
                os.write(target, packet)
            except OSError:
                # A full or closed device loses packets, as a real one does.
                pass
        if 0 in readable:
            read = os.read(0, 4096)
            if not read:
                return
            *lines, orders = (orders + read).split(b"\n")
            for line in lines:
                order = json.loads(line)
                delay, loss = order["delay_ms"] / 1000, order["loss"]
                say("ok")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
