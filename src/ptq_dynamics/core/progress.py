"""Progress of long work, from any process to one bar on the terminal.

Workers append lines to the file named by ``$PTQ_PROGRESS`` (short appends are atomic); whoever owns the terminal
watches the file and draws one bar over all members, with rate and ETA. So a bar shows even through papermill and Dask.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tqdm import tqdm

ENV = "PTQ_PROGRESS"
_last: dict[str, float] = {}


def announce(title: str, total: float, unit: str) -> None:
    """Begin a new bar: ``total`` units over all members."""
    _append({"title": title, "total": total, "unit": unit})


def report(member: str, done: float, *, resumed: bool = False, final: bool = False) -> None:
    """Say that ``member`` has ``done`` units behind it (at most once a second, the last always)."""
    now = time.monotonic()
    if final or resumed or now - _last.get(member, 0.0) >= 1.0:
        _last[member] = now
        _append({"member": member, "done": done, "resumed": resumed})


def say(text: str) -> None:
    """A line above the bar."""
    _append({"say": text})


def _append(line: dict[str, object]) -> None:
    if path := os.environ.get(ENV):
        with open(path, "a", encoding="utf-8") as f:
            f.write(json.dumps(line) + "\n")
    elif "say" in line:
        print(line["say"], file=sys.stderr, flush=True)


@contextmanager
def watched(interval: float = 0.5) -> Iterator[None]:
    """Draw bars on stderr for everything reported inside; nested use leaves the drawing to the outermost."""
    if os.environ.get(ENV):
        yield
        return
    fd, name = tempfile.mkstemp(prefix="ptq-progress-")
    os.close(fd)
    os.environ[ENV] = name
    stop = threading.Event()
    thread = threading.Thread(target=_draw, args=(Path(name), stop, interval), daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        del os.environ[ENV]
        os.unlink(name)


def _draw(path: Path, stop: threading.Event, interval: float) -> None:
    bar: tqdm | None = None
    done: dict[str, float] = {}
    # a bar that is redrawn twice a second is for a terminal; a log gets a line now and then
    pause = interval if sys.stderr.isatty() else 20.0
    with open(path, encoding="utf-8") as f:
        while True:
            last = stop.is_set()
            for text in f.readlines():
                line = json.loads(text)
                if "title" in line:
                    if bar is not None:
                        bar.close()
                    done = {}
                    bar = tqdm(
                        total=line["total"], unit=line["unit"], unit_scale=True, desc=line["title"],
                        mininterval=pause, maxinterval=pause, dynamic_ncols=True, smoothing=0.05,
                    )  # fmt: skip
                elif "say" in line:
                    tqdm.write(line["say"], file=sys.stderr)
                elif bar is not None:
                    step = line["done"] - done.get(line["member"], 0.0)
                    done[line["member"]] = line["done"]
                    if line["resumed"]:  # finished earlier: counts as done, not as speed
                        bar.initial += step
                        bar.n += step
                        bar.refresh()
                    else:
                        bar.update(step)
            if last:
                break
            stop.wait(interval)
    if bar is not None:
        bar.close()
