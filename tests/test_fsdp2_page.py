"""The tables of docs/fsdp2.md name every keyword and method of FSDP2, and tests that exist."""

from __future__ import annotations

import inspect
import pathlib
import re

import pytest
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as fsdp2_fully_shard

TESTS = pathlib.Path(__file__).parent
PAGE = (TESTS.parent / "docs" / "fsdp2.md").read_text()
ROWS = [line.split("|") for line in PAGE.splitlines() if line.startswith("| ") and "supported |" not in line]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[1].strip())
def test_each_row_has_an_answer_and_a_test_that_exists(row: list[str]) -> None:
    assert row[2].strip() in ("yes", "partly", "no")
    assert row[2].strip() == "yes" or row[3].strip(), "says how, or why not"
    (name,) = re.findall(r"`(test_\w+)`", row[4])
    sources = [path for path in TESTS.rglob("test_*.py") if f"def {name}(" in path.read_text()]
    assert len(sources) == 1


def test_every_keyword_and_method_has_a_row() -> None:
    named = " ".join(row[1] for row in ROWS)
    keywords = set(inspect.signature(fsdp2_fully_shard).parameters) - {"module"}
    keywords |= set(inspect.signature(MixedPrecisionPolicy).parameters)
    methods = {name for name, value in vars(FSDPModule).items() if callable(value) and not name.startswith("_")}
    assert [name for name in sorted(keywords | methods) if not re.search(rf"\b{name}\b", named)] == []


def test_every_test_that_the_text_names_exists() -> None:
    sources = [path.read_text() for path in TESTS.rglob("test_*.py")]
    for name in set(re.findall(r"`(test_\w+)`", PAGE)):
        assert sum(f"def {name}(" in source for source in sources) == 1, name
