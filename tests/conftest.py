import os
from collections.abc import Iterator

import hypothesis
import pytest
import torch

from .ranks import close_pool, crashes

# A draw may start a gloo world, so no deadline; CI draws the same examples each time.
hypothesis.settings.register_profile("default", deadline=None, max_examples=25)
hypothesis.settings.register_profile("ci", deadline=None, max_examples=25, derandomize=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "default")


@pytest.fixture(scope="module", autouse=True)
def _ranks() -> Iterator[None]:
    """No worker process outlives a file of tests: what one leaves in a process, compiled code above all, ends there."""
    yield
    close_pool()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("cuda"):
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for crash in crashes:
        terminalreporter.section("a worker crashed, and its job was run once more", yellow=True)
        terminalreporter.write_line(crash)
