"""The tools find what they are there to find."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TOOLS = ROOT / "tools"


def package_in(folder: Path, files: dict[str, str]) -> Path:
    """A package `fsdp_passes` with the given files, and an empty __init__.py in each of its folders."""
    package = folder / "fsdp_passes"
    for name, source in {"__init__.py": "", "passes/__init__.py": "", "inspect/__init__.py": "", **files}.items():
        path = package / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    return package


def check_imports(package: Path) -> tuple[int, list[str]]:
    command = [sys.executable, str(TOOLS / "check_imports.py"), str(package)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stderr == ""
    return done.returncode, done.stdout.splitlines()


CLEAN = {
    "_torch_compat.py": "from torch._inductor import config\nfrom torch.fx import _pytree\n",
    "options.py": "import torch\naten = torch.ops.aten\n",
    "passes/_graph.py": "import torch\naten = torch.ops.aten\nTARGETS = (aten._to_copy.default,)\n",
    "passes/one.py": (
        "import torch\nfrom fsdp_passes.passes._graph import aten\nfrom fsdp_passes.options import aten as same\n"
        "def _mine(op: torch._ops.OpOverload) -> bool:\n"
        "    return op._schema.name in (aten._to_copy, same._foreach_add, torch.ops._c10d_functional.wait_tensor)\n"
    ),
    "unit.py": (
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from fsdp_passes.backend import overlap\n"
        "class Unit:\n    def __init__(self, other):\n        self._kept = other._kept\n"
        "        other._fsdp_mark = self\n"
        "        other._parameters.clear()\n"
    ),
    "backend.py": "from fsdp_passes.unit import Unit\nfrom fsdp_passes.passes.one import _mine\n",
    "__main__.py": "import fsdp_passes.inspect\n",
    "inspect/page.py": "from fsdp_passes.backend import Unit\nfrom fsdp_passes import inspect\n",
}


def test_a_clean_package_passes(tmp_path: Path) -> None:
    code, lines = check_imports(package_in(tmp_path, CLEAN))
    assert (code, lines) == (0, ["imports of fsdp_passes go one way"])


@pytest.mark.parametrize(
    ("name", "source", "message"),
    [
        ("passes/two.py", "from fsdp_passes.backend import Unit", "1: a pass imports the backend"),
        ("passes/two.py", "\nimport fsdp_passes.backend", "2: a pass imports the backend"),
        ("passes/two.py", "from ..backend import Unit", "1: a pass imports the backend"),
        (
            "passes/two.py",
            "def late():\n    from fsdp_passes.passes import one",
            "2: a pass imports another pass, passes.one; what passes share belongs in passes/_*.py",
        ),
        ("passes/two.py", "import torch\ntorch.cuda.synchronize()", "2: a pass touches CUDA: torch.cuda.synchronize"),
        ("passes/two.py", "from torch import cuda", "1: a pass touches CUDA: torch.cuda"),
        (
            "two.py",
            "from fsdp_passes.inspect import page",
            "1: only __init__.py, __main__.py and inspect/ may import inspect.page",
        ),
        (
            "two.py",
            "from torch._inductor import config",
            "1: the internal name torch._inductor.config belongs in _torch_compat.py",
        ),
        (
            "two.py",
            "from torch.fx import _pytree",
            "1: the internal name torch.fx._pytree belongs in _torch_compat.py",
        ),
        (
            "two.py",
            "import torch.distributed as dist\ndist.distributed_c10d._get_default_group()",
            "2: the internal name torch.distributed.distributed_c10d._get_default_group belongs in _torch_compat.py",
        ),
        (
            "two.py",
            "def local(tensor):\n    return tensor._local_tensor",
            "2: the internal attribute _local_tensor belongs in _torch_compat.py",
        ),
    ],
)
def test_each_broken_rule_is_found_once_at_its_line(tmp_path: Path, name: str, source: str, message: str) -> None:
    code, lines = check_imports(package_in(tmp_path, {**CLEAN, name: source}))
    assert (code, lines) == (1, [f"fsdp_passes/{name}:{message}"])


def test_imports_in_a_circle_are_found(tmp_path: Path) -> None:
    files = {
        "one.py": "import fsdp_passes.two\n",
        "two.py": "from fsdp_passes import three\n",
        "three.py": "from fsdp_passes.one import x\n",
    }
    code, lines = check_imports(package_in(tmp_path, files))
    assert (code, lines) == (1, ["fsdp_passes/one.py:1: modules import each other: one -> two -> three -> one"])


@pytest.mark.parametrize("tool", ["tools/quickstart", "tools/test", "tools/format", ".ci/run"])
def test_each_tool_can_be_started(tool: str) -> None:
    assert os.access(ROOT / tool, os.X_OK)
    assert subprocess.run(["bash", "-n", str(ROOT / tool)]).returncode == 0


@pytest.mark.parametrize(
    ("source", "formatted"),
    [("x = [1,2]\n", "x = [1, 2]\n"), ("import os\n\nx = 1\n", "x = 1\n")],
    ids=["format", "lint"],
)
def test_format_checks_without_changing_and_repairs_without_check(tmp_path: Path, source: str, formatted: str) -> None:
    (tmp_path / "tools").mkdir()
    for name in ("format", "environment.sh"):
        shutil.copy(TOOLS / name, tmp_path / "tools")
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    file = tmp_path / "example.py"
    file.write_text(source)

    def run(*arguments: str) -> int:
        environment = {**os.environ, "PYTHON": sys.executable}
        return subprocess.run(
            [tmp_path / "tools" / "format", *arguments], env=environment, capture_output=True
        ).returncode

    assert run("--check") == 1
    assert file.read_text() == source
    assert run() == 0
    assert file.read_text() == formatted
    assert run("--check") == 0
    assert run("--chekc") == 2
