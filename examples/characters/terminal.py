"""What the user sees while it runs: phases and their time, bars with rate and time left, clear failures."""

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from tqdm import tqdm

# In a log file a bar is a new line at each refresh, so it refreshes rarely there.
BAR: dict[str, Any] = {
    "file": sys.stdout,
    "mininterval": 0.2 if sys.stdout.isatty() else 15.0,
    "maxinterval": 1.0 if sys.stdout.isatty() else 60.0,
    "dynamic_ncols": True,
    "leave": True,
}


class Failure(Exception):
    """Something the user can put right; shown without a traceback."""


def say(text: str) -> None:
    """One line to the terminal, in order with the bars."""
    tqdm.write(text, file=sys.stdout)
    sys.stdout.flush()


@contextlib.contextmanager
def phase(title: str, times: dict[str, float]) -> Iterator[None]:
    """Announces a stage and, once it is through, notes and shows the seconds it took."""
    say(f"▸ {title}")
    start = time.monotonic()
    yield
    times[title] = time.monotonic() - start
    say(f"  {times[title]:.1f} s")


def guarded(main: Callable[[], None]) -> None:
    """Runs a stage as a program: failures the user can put right and Ctrl-C end it in one line."""
    try:
        main()
    except Failure as failure:
        sys.exit(f"error: {failure}")
    except KeyboardInterrupt:
        sys.exit("interrupted")
