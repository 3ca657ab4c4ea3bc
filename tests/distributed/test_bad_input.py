"""Mistakes get an error that names the place, what was expected and what to do, and the model is left as it was."""

from __future__ import annotations

import contextlib
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import OffloadPolicy
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from fsdp_passes import errors, fully_shard, overlap_fsdp
from tests.distributed.checks import WAYS, call_of, compiled, float_batches
from tests.graphs import eight_fake_ranks as eight_fake_ranks
from tests.ranks import RankPool
from tests.training import assert_same, build, my_share, train

HERE = "tests.distributed.test_bad_input"


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(x).square().mean()


def snapshot(model: nn.Module) -> list[Any]:
    """Everything that sharding changes: classes, attributes, hooks, the parameter objects and what is set on them."""
    seen: list[Any] = []
    for path, module in model.named_modules():
        seen += [path, type(module), sorted(module.__dict__), len(module._forward_hooks)]
        seen += [len(module._forward_pre_hooks), *module._parameters]
        for param in module._parameters.values():
            seen += [id(param), type(param), sorted(getattr(param, "__dict__", ()))]
    return seen


@contextlib.contextmanager
def refused(model: nn.Module, error: type[errors.FsdpError], *parts: str) -> Iterator[None]:
    """The code inside raises `error`, whose message has all `parts`, and does nothing to `model`."""
    before = snapshot(model)
    values = {name: param.detach().clone() for name, param in model.named_parameters()}
    with pytest.raises(error) as raised:
        yield
    message = str(raised.value)
    for part in parts:
        assert part in message, message
    assert message.startswith(parts[0]), f"the place comes first: {message}"
    assert snapshot(model) == before
    for name, param in model.named_parameters():
        assert torch.equal(param.detach(), values[name]), name


def assert_still_trains(model: nn.Module, *inputs: Tensor) -> None:
    """The model computes and gives a gradient, unsharded; then a correct call shards it."""
    model(*inputs).sum().backward()
    assert all(type(param.grad) is Tensor for param in model.parameters() if param.requires_grad)
    model.zero_grad()


# ---- fully_shard -----------------------------------------------------------------------------------------------------


def test_without_a_process_group() -> None:
    model = Model()
    parts = "expected an initialized process group", "found none", "init_process_group()", "init_device_mesh()"
    with refused(model, errors.NoProcessGroupError, "fully_shard", *parts):
        fully_shard(model, units=["layers.*"])
    assert_still_trains(model, torch.ones(2, 8))


@pytest.mark.usefixtures("eight_fake_ranks")
class TestFullyShard:
    def test_twice_on_one_module(self) -> None:
        model = Model()
        fully_shard(model.head)
        with refused(model, errors.AlreadyShardedError, "Linear", "already been called", "once per module"):
            fully_shard(model.head)
        with refused(model, errors.AlreadyShardedError, "head"):
            fully_shard(model, units=["head"])
        fully_shard(model)
        with refused(model, errors.AlreadyShardedError, "Model"):
            fully_shard(model)

    def test_a_container_without_a_forward(self) -> None:
        model = Model()
        parts = "expected a module with a forward", "units=['<path>.*']"
        with refused(model, errors.NoForwardError, "layers (ModuleList)", *parts):
            fully_shard(model, units=["layers"])
        with refused(model, errors.NoForwardError, "ModuleList"):
            fully_shard(model.layers)

    def test_a_parent_before_its_child(self) -> None:
        model = fully_shard(Model())
        parts = "'root'", "'weight'", "innermost modules first"
        with refused(model, errors.WrapOrderError, "Linear", *parts):
            fully_shard(model.layers[0])

    def test_a_parameter_that_is_a_dtensor_on_another_mesh(self) -> None:
        model = Model()
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "tensor"))
        weight = model.layers[1].weight
        model.layers[1].weight = nn.Parameter(distribute_tensor(weight.detach(), mesh["tensor"], [Shard(0)]))
        parts = "expected a plain tensor", "DTensor", "tensor", "ignored_params"
        with refused(model, errors.ForeignDTensorError, "layers.1.weight", *parts):
            fully_shard(model, units=["layers.*"])
        fully_shard(model, units=["layers.*"], ignored_params={model.layers[1].weight})

    def test_a_mesh_of_three_dimensions(self) -> None:
        model = Model()
        mesh = init_device_mesh("cpu", (2, 4, 1), mesh_dim_names=("replicate", "shard", "tensor"))
        parts = "expected a DeviceMesh with one dimension, or two", "3 dimensions", "tensor", "mesh['shard']"
        with refused(model, errors.MeshError, "mesh", *parts):
            fully_shard(model, mesh=mesh)
        assert_still_trains(model, torch.ones(2, 8))
        fully_shard(model, mesh=mesh["shard"])
        assert model.head.weight.device_mesh.size() == 4

    @pytest.mark.parametrize(
        ("argument", "value"),
        [
            ("offload_policy", "cpu"),
            ("dp_mesh_dims", ("shard",)),
        ],
    )
    def test_arguments_without_support(self, argument: str, value: Any) -> None:
        model = Model()
        with refused(model, errors.UnsupportedArgumentError, argument, "not supported"):
            fully_shard(model, **{argument: value})
        assert_still_trains(model, torch.ones(2, 8))
        fully_shard(model, reshard_after_forward=True, offload_policy=OffloadPolicy())

    @pytest.mark.parametrize(
        ("argument", "value", "expected"),
        [
            ("mesh", "cpu", "a DeviceMesh"),
            ("units", [0], "a pattern of module paths"),
            ("units", 0, "a pattern of module paths"),
            ("mp_policy", torch.bfloat16, "MixedPrecisionPolicy"),
            ("ignored_params", ["head.weight"], "the nn.Parameters themselves"),
        ],
    )
    def test_arguments_of_another_kind(self, argument: str, value: Any, expected: str) -> None:
        model = Model()
        with refused(model, errors.OptionValueError, f"{argument}: expected", expected):
            fully_shard(model, **{argument: value})
        assert_still_trains(model, torch.ones(2, 8))

    def test_several_modules(self) -> None:
        model = Model()
        with refused(model, errors.OptionValueError, "module: expected an nn.Module", "units=[...]"):
            fully_shard([model])  # type: ignore[type-var]

    @pytest.mark.parametrize("value", [3, 16, 0, "yes", 2.0])
    def test_a_number_that_does_not_divide_the_ranks(self, value: Any) -> None:
        model = Model()
        with refused(model, errors.OptionValueError, "reshard_after_forward", "a divisor of 8", repr(value)):
            fully_shard(model, reshard_after_forward=value)
        fully_shard(model, reshard_after_forward=4)

    @pytest.mark.parametrize(
        ("placement", "expected"),
        [
            (Shard(2), "a dimension of its shape"),
            (Shard(-3), "a dimension of its shape"),
            (Replicate(), "None or Shard(dim)"),
            (1, "None or Shard(dim)"),
            (Shard(1), "that 8 ranks divide"),
        ],
    )
    def test_placements_that_a_parameter_cannot_have(self, placement: Any, expected: str) -> None:
        model = nn.Linear(7, 8)
        with refused(model, errors.ShardPlacementError, "weight", expected, repr(placement)):
            fully_shard(model, shard_placement_fn=lambda param: placement if param.dim() == 2 else None)
        fully_shard(model, shard_placement_fn=lambda param: Shard(-2) if param.dim() == 2 else None)
        assert model.weight.placements == (Shard(0),)

    @pytest.mark.parametrize(
        ("value", "found", "instead"),
        [(torch.empty(0, 8), "(0, 8)", "ignored_params")],
    )
    def test_a_parameter_without_rows(self, value: Tensor, found: str, instead: str) -> None:
        model = Model()
        model.layers[1].register_parameter("extra", nn.Parameter(value))
        parts = "split along dimension 0", found, instead
        with refused(model, errors.UnsupportedParameterError, "layers.1.extra", *parts):
            # The head and layer 0 would be fine: nothing of them is sharded either.
            fully_shard(model, units=["layers.0", "head"])
        with refused(model, errors.UnsupportedParameterError, "layers.1.extra", *parts):
            fully_shard(model, units=["layers.*"])
        fully_shard(model, units=["layers.*"], ignored_params={model.layers[1].extra})

    def test_an_integer_parameter_that_requires_a_gradient(self) -> None:
        class Quantized(nn.Parameter):
            """PyTorch's own class refuses this; those of quantization libraries may not."""

            requires_grad = True

        model = Model()
        model.head.weight = Quantized(torch.ones(3, 8, dtype=torch.int8), requires_grad=False)
        parts = "floating-point", "int8", "requires_grad_(False)", "buffer"
        with refused(model, errors.IntegerParameterError, "head.weight", *parts):
            fully_shard(model, units=["layers.*"])

    def test_a_parameter_that_a_module_also_keeps_in_a_list(self) -> None:
        model = nn.Sequential(OrderedDict(rnn=nn.LSTM(4, 5), head=nn.Linear(5, 2)))
        parts = "_flat_weights", "only reference", "ignored_params"
        with refused(model, errors.CapturedParameterError, "rnn.weight_ih_l0", *parts):
            fully_shard(model, units=["head"])
        fully_shard(model, units=["head"], ignored_params=set(model.rnn.parameters()))

    def test_a_pattern_that_matches_no_module(self) -> None:
        model = Model()
        parts = "'blocks.*'", "layers.0", "head", "'**'"
        with refused(model, errors.UnitPatternError, "units", *parts):
            fully_shard(model, units=["layers.*", "blocks.*"])
        with refused(model, errors.UnitPatternError, "units", "'layers.*.weight'"):
            fully_shard(model, units=["layers.*.weight"])
        assert_still_trains(model, torch.ones(2, 8))
        fully_shard(model, units=["layers.*"])

    def test_every_error_is_a_fsdp_error_and_the_builtin_that_fits(self) -> None:
        with pytest.raises(ValueError, match="units") as raised:
            fully_shard(Model(), units=["nothing"])
        assert isinstance(raised.value, errors.FsdpError)


# ---- torch.compile ---------------------------------------------------------------------------------------------------


def warnings_of_an_unsharded_model() -> list[str]:
    model, reference = build(Model)
    call = compiled(model, dynamic=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")  # as Python shows them: each once per place
        for rows in (2, 4, 1, 3):
            x = torch.randn(rows, 8)
            torch.testing.assert_close(call(x), reference(x))
            call(x).backward()
    assert all(param.grad is not None for param in model.parameters())
    return [str(w.message) for w in caught if issubclass(w.category, errors.NothingShardedWarning)]


def test_an_unsharded_model_is_compiled_with_one_warning() -> None:
    """In a process of its own: it is to be shown once, however often the model is compiled again."""
    pool = RankPool(1)
    (found,) = pool.run(f"{HERE}:warnings_of_an_unsharded_model")
    pool.close()
    assert len(found) == 1, found
    assert "expected a model with sharded parameters" in found[0]
    assert "fully_shard()" in found[0]


def test_code_without_parameters_is_compiled_without_a_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", errors.NothingShardedWarning)
        assert torch.equal(compiled(lambda x: x + 1)(torch.ones(3)), torch.full((3,), 2.0))


class Writes(Model):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.write(self.layers[1].weight)
        return super().forward(x)


def scale(weight: Tensor) -> None:
    weight.mul_(0.5)


def write_through_a_view(weight: Tensor) -> None:
    weight.t()[0].add_(1)


def mutated_parameter(write: Callable[[Tensor], None]) -> None:
    """The error comes on every rank; afterwards the same model trains with code that only reads."""
    model, reference = build(Writes)
    fully_shard(model, units=["layers.*"])
    model.write = reference.write = write
    with pytest.raises(BackendCompilerFailed) as raised:
        compiled(model)(torch.ones(2, 8))
    assert isinstance(raised.value.inner_exception, errors.MutatedParameterError)
    message = str(raised.value.inner_exception)
    assert message.startswith("layers.1.weight: expected a parameter that is only read")
    assert "as an optimizer does" in message

    torch._dynamo.reset()
    model.write = reference.write = lambda weight: None
    batches = float_batches(2, 4, 8)
    found = train(model, batches, sharded=True, call=compiled(model))
    assert_same(found, train(reference, batches, sharded=False))


@pytest.mark.parametrize("write", [scale, write_through_a_view])
def test_compiled_code_that_writes_into_a_parameter(two_ranks: RankPool, write: Callable[[Tensor], None]) -> None:
    two_ranks.run(f"{HERE}:mutated_parameter", write=write)


class Renormed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 8, max_norm=1.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.table(x.argmax(1)).square().mean()


def written_in_the_fallback() -> None:
    """Behind the error, the same model trains once it only reads."""
    model, reference = build(Renormed)
    fully_shard(model, units=["table"])
    batches = float_batches(2, 4, 8)
    with pytest.raises(errors.MutatedParameterError, match=r"^table\.weight: expected a parameter that is only read"):
        model(*my_share(batches[0]))
    model.table.max_norm = reference.table.max_norm = None
    model.table.unshard()
    with torch.no_grad():
        model.table.weight.mul_(2)
    with pytest.raises(errors.MutatedParameterError, match=r"^table\.weight: .*by hand behind unshard\(\)\."):
        model(*my_share(batches[0]))
    assert_same(train(model, batches, sharded=True), train(reference, batches, sharded=False))


def test_gathered_values_that_were_written_in_an_uncompiled_forward_or_behind_unshard(two_ranks: RankPool) -> None:
    two_ranks.run(f"{HERE}:written_in_the_fallback")


def wrong_option() -> None:
    model, reference = build(Model)
    fully_shard(model, units=["layers.*"])
    batches = float_batches(2, 4, 8)
    for options, text in (({"prefetch": 0}, "prefetch: expected an integer"), ({"bucket": 1}, "bucket: expected one")):
        with pytest.raises(BackendCompilerFailed, match=text):
            torch.compile(model, backend=overlap_fsdp, options=options)(*my_share(batches[0]))
    found = train(model, batches, sharded=True, call=compiled(model))
    assert_same(found, train(reference, batches, sharded=False))


def test_after_a_wrong_option_the_model_compiles_and_trains(two_ranks: RankPool) -> None:
    two_ranks.run(f"{HERE}:wrong_option")


# ---- later -----------------------------------------------------------------------------------------------------------


def replaced_parameter(way: str) -> None:
    """Loading whole tensors is refused and undone; a whole tensor that was set is named until ours is back."""
    model, reference = build(Model)
    fully_shard(model, units=["layers.*"])
    call, batches = call_of(model, way), float_batches(4, 4, 8)
    train(model, batches[:2], sharded=True, call=call)
    train(reference, batches[:2], sharded=False)

    whole_state = {name: value * 2 for name, value in reference.state_dict().items()}
    with pytest.raises(errors.ReplacedParameterError, match=r"^layers\.0\.weight: .* a whole tensor of shape \(8, 8\)"):
        model.load_state_dict(whole_state, assign=True)
    ours = model.head.weight
    model.head.weight = nn.Parameter(torch.ones(3, 8))
    with pytest.raises(errors.ReplacedParameterError, match=r"^head\.weight: expected the DTensor of shape \(3, 8\)"):
        call(*my_share(batches[2]))
    model.head.weight = ours

    found = train(model, batches[2:], sharded=True, call=call)
    assert_same(found, train(reference, batches[2:], sharded=False))


@pytest.mark.parametrize("way", WAYS)
def test_whole_tensors_in_the_place_of_shards(two_ranks: RankPool, way: str) -> None:
    two_ranks.run(f"{HERE}:replaced_parameter", way=way)


class Complex(nn.Module):
    """Five rows, so that one rank's are padded."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(5, 8, dtype=torch.complex64) / 4)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head((x.to(torch.complex64) @ self.filter.t()).abs()).square().mean()


def complex_parameter() -> None:
    model, reference = build(Complex)
    fully_shard(model)
    batches = float_batches(3, 4, 8)
    with pytest.raises(BackendCompilerFailed) as raised:
        compiled(model)(*my_share(batches[0]))
    assert str(raised.value.inner_exception).startswith("filter: expected parameters of real numbers in compiled code")

    def sgd(params: Iterable[Tensor], lr: float) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=0.1)

    found = train(model, batches, sharded=True, clip=None, optimizer=sgd)
    assert_same(found, train(reference, batches, sharded=False, clip=None, optimizer=sgd))


def test_complex_parameters_train_uncompiled_and_compiled_code_refuses_them(two_ranks: RankPool) -> None:
    """Collectives of pairs of real numbers: gloo does not gather complex ones as a group."""
    two_ranks.run(f"{HERE}:complex_parameter")


@pytest.mark.usefixtures("eight_fake_ranks")
def test_an_embedding_with_sparse_gradients() -> None:
    model = nn.Sequential(nn.Embedding(16, 4, sparse=True), nn.Linear(4, 4))
    with refused(model, errors.UnsupportedParameterError, "0.weight", "sparse=True", "ignored_params"):
        fully_shard(model)
    fully_shard(model, ignored_params={model[0].weight})


@pytest.mark.usefixtures("eight_fake_ranks")
def test_an_exported_module() -> None:
    model = fully_shard(Model())
    with refused(model, errors.ExportedModuleError, "torch.export", "full_state_dict=True"):
        torch.export.export(model, (torch.ones(2, 8),), strict=False)
    with pytest.raises(errors.ExportedModuleError):  # not `refused`: Dynamo marks parameters that it looks at
        torch.export.export(model, (torch.ones(2, 8),), strict=True)
