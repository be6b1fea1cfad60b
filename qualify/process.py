# SPDX-License-Identifier: Apache-2.0
"""Run one bounded child process. Standard library only."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

HEARTBEAT_S = 30.0


class CommandError(RuntimeError):
    """A child process failed or ran past its limit; the message names it and ends with its last output."""


def capture(
    command: Sequence[str | Path],
    *,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    timeout_s: float = 120.0,
    check: bool = True,
) -> subprocess.CompletedProcess[str]:
    """Run `command` and return what it printed (stdout and stderr apart).

    Raises CommandError when it cannot start, runs past `timeout_s`, or (with `check`) exits non-zero.
    """
    words = [str(word) for word in command]
    try:
        done = subprocess.run(
            words, cwd=cwd, env=env, timeout=timeout_s, capture_output=True, text=True, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise CommandError(f"`{shlex.join(words)}` ran past its limit of {timeout_s:g} s") from error
    except OSError as error:
        raise CommandError(f"`{shlex.join(words)}` could not start: {error}") from error
    if check and done.returncode:
        raise CommandError(
            f"`{shlex.join(words)}` exited with {done.returncode}:\n{tail(done.stdout + done.stderr)}"
        )
    return done


def stream(
    command: Sequence[str | Path],
    *,
    log: Path,
    env: Mapping[str, str] | None = None,
    timeout_s: float,
    keep_open: Sequence[int] = (),
) -> None:
    """Run a long `command`: on a terminal its own progress shows, elsewhere its output goes to `log`.

    Without a terminal one line every half minute says that it is still at work. `keep_open` are file
    descriptors that the child inherits, so that a lock outlives a killed parent until the child ends too.
    Raises CommandError on a non-zero exit, with the end of the log, and when `timeout_s` has passed.
    """
    words = [str(word) for word in command]
    interactive = sys.stderr.isatty()
    started = time.monotonic()
    code: int | None = None
    with log.open("ab") as sink:
        out = None if interactive else sink
        with subprocess.Popen(words, env=env, stdout=out, stderr=out, pass_fds=tuple(keep_open)) as child:
            try:
                while code is None:
                    left = timeout_s - (time.monotonic() - started)
                    if left <= 0:
                        raise CommandError(f"`{words[0]} ...` ran past its limit of {timeout_s:g} s")
                    try:
                        code = child.wait(timeout=min(HEARTBEAT_S, left))
                    except subprocess.TimeoutExpired:
                        if not interactive:
                            print(f"  still at work ({time.monotonic() - started:.0f} s)", flush=True)
            except BaseException:
                child.kill()
                raise
    if code:
        said = "" if interactive else ":\n" + tail(log.read_text(encoding="utf-8", errors="replace"))
        raise CommandError(f"`{shlex.join(words)}` exited with {code}{said}")


def tail(text: str, lines: int = 30) -> str:
    """The last `lines` lines of `text`."""
    return "\n".join(text.rstrip().splitlines()[-lines:])


def clean_environment(base: Mapping[str, str] | None = None) -> dict[str, str]:
    """`base` (default: this process's environment) without what would leak another Python into a child."""
    leaks = {"PYTHONPATH", "PYTHONHOME", "PYTHONSTARTUP", "VIRTUAL_ENV", "__PYVENV_LAUNCHER__"}
    source = os.environ if base is None else base
    return {key: value for key, value in source.items() if key not in leaks} | {"PYTHONNOUSERSITE": "1"}


def write_atomically(path: Path, text: str) -> None:
    """Write a file so that a reader sees all of it or none, also after a crash."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    with scratch.open("w", encoding="utf-8") as handle:
        handle.write(text)
        handle.flush()
        os.fsync(handle.fileno())
    scratch.replace(path)
