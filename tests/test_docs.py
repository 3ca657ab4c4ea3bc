"""Every Python block of the README and of docs/ runs."""

from __future__ import annotations

import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def python_blocks(page: pathlib.Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.S)


@pytest.mark.parametrize("page", [page for page in PAGES if python_blocks(page)], ids=lambda page: page.name)
def test_the_python_blocks_of_a_page_run(page: pathlib.Path, tmp_path: pathlib.Path) -> None:
    script = tmp_path / "page.py"
    script.write_text("\n".join(python_blocks(page)))
    num_ranks = "1" if '"fake"' in script.read_text() else "2"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", num_ranks]
    result = subprocess.run([*launcher, str(script)], capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert result.returncode == 0, result.stderr[-3000:]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_links_of_a_page_lead_to_files(page: pathlib.Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
