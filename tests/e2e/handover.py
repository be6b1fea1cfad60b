# SPDX-License-Identifier: Apache-2.0
"""A stand-in for the `python` command that hands its start to a zygote (see `zygote.py`).

It passes its arguments, environment, working directory and every open descriptor over a Unix socket, then
stays as the process its parent knows: it forwards signals and ends with the real process's exit status. If
it is killed, the zygote kills the real process. A start the zygote has nothing to save for runs the real
interpreter instead.

It runs with `python -IS` and imports only what starts in milliseconds.
"""

import json
import os
import signal
import socket
import struct
import sys

FORWARDED_SIGNALS = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
HEADER = struct.Struct("!II")
"""Length of the JSON request, and how many descriptors follow it."""
STATUS = struct.Struct("!i")
"""What the zygote answers at the end: the status that `os.waitpid` gave."""
DESCRIPTORS_PER_MESSAGE = 64


def worth_forking(arguments: list[str]) -> bool:
    """Whether this start imports vLLM: a module of ours, a test's or vLLM's, or one that multiprocessing spawns."""
    for index, argument in enumerate(arguments[:-1]):
        following = arguments[index + 1]
        if argument == "-m":
            return following.split(".")[0] in {"afd_plugin", "vllm", "tests"}
        if argument == "-c":
            return "spawn_main(" in following
    return False


def open_descriptors(but: int) -> list[int]:
    """Every open descriptor of this process except `but`."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        number = int(name)
        try:
            os.fstat(number)
        except OSError:
            continue  # the one that listed the folder
        if number != but:
            found.append(number)
    return sorted(found)


def request(connection: socket.socket, arguments: list[str]) -> None:
    """Send the start: one JSON header and the descriptors it numbers."""
    descriptors = open_descriptors(but=connection.fileno())
    content = json.dumps(
        {
            "arguments": arguments,
            "environment": dict(os.environ),
            "folder": os.getcwd(),
            "descriptors": descriptors,
        }
    ).encode()
    connection.sendall(HEADER.pack(len(content), len(descriptors)) + content)
    for start in range(0, len(descriptors), DESCRIPTORS_PER_MESSAGE):
        socket.send_fds(connection, [b"d"], descriptors[start : start + DESCRIPTORS_PER_MESSAGE])


def receive_exactly(connection: socket.socket, size: int) -> bytes:
    """`size` bytes, or fewer when the peer has gone."""
    data = b""
    while len(data) < size:
        piece = connection.recv(size - len(data))
        if not piece:
            break
        data += piece
    return data


def end_like(status: int) -> None:
    """End this process as the real one ended: same exit code, or killed by the same signal."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.WEXITSTATUS(status))


def main() -> None:
    """`handover.py SOCKET INTERPRETER ARGUMENTS...`."""
    address, interpreter, *arguments = sys.argv[1:]
    if not worth_forking(arguments):
        os.execv(interpreter, [interpreter, *arguments])  # noqa: S606 (becoming Python is the point)
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(address)
    request(connection, arguments)
    for number in FORWARDED_SIGNALS:
        signal.signal(number, lambda received, frame: connection.sendall(bytes([received])))
    for number in open_descriptors(but=connection.fileno()):
        os.close(number)  # the real process holds them now: nobody may wait on this one's copies
    status = receive_exactly(connection, STATUS.size)
    if len(status) < STATUS.size:
        os._exit(70)  # the zygote has gone
    end_like(STATUS.unpack(status)[0])


if __name__ == "__main__":
    main()
