"""Every Python example of the README and the docs runs."""

import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def examples(page: pathlib.Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


def is_script(example: str) -> bool:
    """Whether the example is a file of its own, which its first line says how to start."""
    return example.startswith("# torchrun ")


@pytest.mark.parametrize("page", [p for p in PAGES if examples(p)], ids=lambda page: page.name)
def test_the_examples_of_a_page_run_in_order(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source = "\n".join(example for example in examples(page) if not is_script(example))
    exec(compile(source, page.name, "exec"), {})


def test_the_readmes_training_script_runs_under_torchrun(tmp_path):
    (script,) = [example for example in examples(ROOT / "README.md") if is_script(example)]
    command, *_ = script.splitlines()
    arguments = command.removeprefix("# torchrun ").split()
    (tmp_path / arguments[-1]).write_text(script)
    subprocess.run([sys.executable, "-m", "torch.distributed.run", *arguments], cwd=tmp_path, check=True, timeout=180)
