"""overlap_fsdp as torch.compile finds it: by object, by name, with options and a mode."""

from __future__ import annotations

import copy
import importlib.metadata
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fsdp_passes import fully_shard, overlap_fsdp
from fsdp_passes.backend import _warn_unchecked
from fsdp_passes.errors import CudaGraphsWarning, NothingShardedWarning, UncheckedGraphsWarning
from fsdp_passes.pipeline import record_compilations
from tests.graphs import TinyTransformer
from tests.graphs import one_rank as one_rank
from tests.inductor_code import NO_CACHE

pytestmark = pytest.mark.usefixtures("one_rank")


def is_installed() -> bool:
    return any(entry.name == "overlap_fsdp" for entry in importlib.metadata.entry_points(group="torch_dynamo_backends"))


def assert_trains(backend: Any, options: dict[str, Any] | None, mode: str | None = None) -> str:
    """One step equals the unsharded model's; returns the inner compiler that the options chose."""
    reference = TinyTransformer()
    model = fully_shard(copy.deepcopy(reference), units=["layers.*"])
    tokens = torch.arange(4)
    with record_compilations() as records:
        found = torch.compile(model, backend=backend, mode=mode, options=options)(tokens)
        found.square().sum().backward()
    expected = reference(tokens)
    expected.square().sum().backward()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    for name, param in model.named_parameters():
        torch.testing.assert_close(param.grad.full_tensor(), reference.get_parameter(name).grad, rtol=0, atol=1e-5)
    (record,) = records
    assert record.unit_names == ["root", "layers.0", "layers.1", "layers.2"]
    return record.options.inner


@pytest.mark.skipif(not is_installed(), reason="entry points exist only where the package is installed")
@pytest.mark.parametrize("options", [{"inner": "aot_eager"}, {"inner": "eager", "prefetch": 2}])
def test_the_backend_is_found_by_name_and_takes_options(options: dict[str, Any]) -> None:
    assert "overlap_fsdp" in torch._dynamo.list_backends()
    assert assert_trains("overlap_fsdp", options) == options["inner"]


@pytest.mark.skipif(not is_installed(), reason="entry points exist only where the package is installed")
def test_by_name_an_unknown_option_is_refused_as_well() -> None:
    layer = fully_shard(nn.Linear(8, 8))
    with pytest.raises(Exception, match="prefech: expected one of the options"):
        torch.compile(layer, backend="overlap_fsdp", options={"prefech": 1})(torch.ones(1, 8))


@pytest.mark.parametrize("inner", ["inductor", "aot_eager", "eager"])
def test_each_inner_compiler_trains(inner: str) -> None:
    assert assert_trains(overlap_fsdp, {"inner": inner, "inductor": NO_CACHE}) == inner


@pytest.mark.parametrize(("flags", "inner"), [("nan", "aot_eager"), ("nan", "eager"), ("eager,nan", "aot_eager")])
def test_nan_in_released_weights_says_where_graphs_do_not_have_it(
    monkeypatch: pytest.MonkeyPatch, flags: str, inner: str
) -> None:
    monkeypatch.setenv("FSDP_PASSES_DEBUG", flags)
    _warn_unchecked.cache_clear()  # it is said once in a process
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert_trains(overlap_fsdp, {"inner": inner})
    found = [str(warning.message) for warning in caught if warning.category is UncheckedGraphsWarning]
    assert len(found) == ((flags, inner) == ("nan", "aot_eager"))
    assert all("Set FSDP_PASSES_DEBUG=eager,nan" in text for text in found)


def test_without_options_inductor_runs() -> None:
    assert assert_trains(overlap_fsdp, None) == "inductor"


def test_fullgraph_holds_the_whole_model() -> None:
    model = fully_shard(TinyTransformer(), units=["layers.*"])
    compiled = torch.compile(model, backend=overlap_fsdp, options={"inner": "aot_eager"}, fullgraph=True)
    with record_compilations() as records:
        compiled(torch.arange(4)).sum().backward()
    assert [len(record.graphs) for record in records] == [2]


def test_with_dynamic_shapes_one_compilation_serves_every_length() -> None:
    model = fully_shard(TinyTransformer(), units=["layers.*"])
    compiled = torch.compile(model, backend=overlap_fsdp, options={"inner": "aot_eager"}, dynamic=True)
    with record_compilations() as records:
        for length in (4, 5, 7, 10):
            compiled(torch.arange(length)).sum().backward()
    # Dynamo tries once with the norms' epsilon as an input and starts again before anything is lowered.
    assert [len(record.graphs) for record in records if record.graphs] == [2]


def test_a_model_that_is_not_sharded_is_compiled_plainly_and_says_so() -> None:
    reference = nn.Linear(8, 8)
    x = torch.ones(2, 8)
    compiled = torch.compile(reference, backend=overlap_fsdp, options={"inner": "aot_eager"})
    with (
        pytest.warns(NothingShardedWarning, match=r"Call fully_shard\(\) on the model"),
        record_compilations() as records,
    ):
        found = compiled(x)
    assert records == []
    torch.testing.assert_close(found, reference(x), rtol=0, atol=0)
    found.sum().backward()
    torch.testing.assert_close(reference.bias.grad, torch.full((8,), 2.0))


def test_a_function_without_parameters_needs_no_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", NothingShardedWarning)
        found = torch.compile(lambda x: x * 2, backend=overlap_fsdp, options={"inner": "aot_eager"})(torch.ones(2))
    assert torch.equal(found, torch.full((2,), 2.0))


@pytest.mark.parametrize("kind", ["with others", "alone"])
def test_a_weight_that_a_compiled_function_returns_has_its_values(kind: str) -> None:
    """The placeholder in its place would be empty, and reading it would end the process."""
    layer = nn.Linear(8, 8)
    whole = layer.weight.detach().clone()
    fully_shard(layer)

    def function(x: torch.Tensor) -> list[torch.Tensor]:
        return [layer.weight] if kind == "alone" else [layer.weight, layer(x)]

    compiled = torch.compile(function, backend=overlap_fsdp, options={"inner": "aot_eager"})
    found = compiled(torch.ones(2, 8))[0]
    assert torch.equal(found, whole)
    found.sum().backward()
    assert torch.equal(layer.weight.grad.full_tensor(), torch.ones(8, 8))


def test_a_weight_that_a_compiled_module_returns_has_its_values() -> None:
    class Layer(nn.Linear):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return super().forward(x), self.weight

    layer = Layer(8, 8)
    whole = layer.weight.detach().clone()
    compiled = torch.compile(fully_shard(layer), backend=overlap_fsdp, options={"inner": "aot_eager"})
    assert torch.equal(compiled(torch.ones(2, 8))[1], whole)


def test_a_second_process_group_after_the_first_was_destroyed() -> None:
    """What is remembered by a group's name must not outlive the group: the next one has the same name."""
    options = {"inner": "aot_eager", "unify_communication_stream": False}
    assert_trains(overlap_fsdp, options)
    dist.destroy_process_group()
    torch._dynamo.reset()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    assert_trains(overlap_fsdp, options)


def test_a_mode_of_inductor_trains() -> None:
    """ "max-autotune" sets the same and more, which takes a minute to compile."""
    with pytest.warns(CudaGraphsWarning, match="triton.cudagraphs"):
        assert assert_trains(overlap_fsdp, None, "reduce-overhead") == "inductor"
