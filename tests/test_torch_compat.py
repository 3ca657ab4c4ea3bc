"""Everything of PyTorch's inside that the library uses is there on this release."""

from __future__ import annotations

import ast
import errno
import inspect
import logging
import pathlib
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import fx, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import fsdp_passes
from fsdp_passes import _torch_compat as compat
from fsdp_passes import fully_shard, overlap_fsdp
from tests.graphs import dynamo_graph, process_group, sharded_transformer, trace, transformer_record
from tests.inductor_code import generated_code

SOURCES = sorted(pathlib.Path(fsdp_passes.__file__).parent.rglob("*.py"))


@pytest.fixture
def mesh_of_one() -> Iterator[dist.DeviceMesh]:
    with process_group("gloo", dist.HashStore(), 1):
        yield init_device_mesh("cpu", (1,))


def test_all_names_exist_and_every_function_is_listed() -> None:
    assert [name for name in compat.__all__ if not hasattr(compat, name)] == []
    defined = {
        name
        for name, value in vars(compat).items()
        if inspect.isfunction(value) and value.__module__ == compat.__name__ and not name.startswith("_")
    }
    assert defined <= set(compat.__all__)
    assert list(compat.__all__) == sorted(compat.__all__, key=lambda name: (name[0].islower(), name))


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_no_other_file_imports_a_private_name_of_torch(path: pathlib.Path) -> None:
    if path.name == "_torch_compat.py":
        return
    tree = ast.parse(path.read_text())
    private = [
        f"{node.module}.{alias.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch")
        for alias in node.names
        if any(part.startswith("_") for part in f"{node.module}.{alias.name}".split("."))
    ]
    assert private == []


# ---- tensors ---------------------------------------------------------------------------------------------------------


def test_dtensors(mesh_of_one: dist.DeviceMesh) -> None:
    whole = torch.arange(6.0).view(3, 2)
    sharded = distribute_tensor(whole, mesh_of_one, [Shard(0)])
    local = compat.local_tensor(sharded)
    assert torch.equal(local, whole)
    made = compat.make_dtensor(local + 1, sharded)
    assert isinstance(made, DTensor)
    assert made.placements == sharded.placements
    assert torch.equal(made.full_tensor(), whole + 1)
    for function in (compat.local_tensor, lambda tensor: compat.make_dtensor(tensor, tensor)):
        with pytest.raises(AssertionError, match="expected a DTensor, found Tensor"):
            function(whole)


def test_gradient_hooks_in_the_order_in_which_autograd_calls_them() -> None:
    param = torch.nn.Parameter(torch.ones(2))
    assert compat.gradient_hooks(param) == ([], [])
    hooks = [lambda grad: None, lambda grad: grad * 2, lambda param: None]
    for register, hook in zip(
        [param.register_hook] * 2 + [param.register_post_accumulate_grad_hook], hooks, strict=True
    ):
        register(hook)
    assert compat.gradient_hooks(param) == (hooks[:2], hooks[2:])


def test_a_write_without_version_bump() -> None:
    tensor = torch.ones(2)
    with compat.without_version_bump(tensor):
        tensor.zero_()
    assert tensor._version == 0
    assert torch.equal(tensor, torch.zeros(2))


def test_the_profiler_is_seen() -> None:
    assert not compat.is_profiler_enabled()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert compat.is_profiler_enabled()
    assert not compat.is_profiler_enabled()


# ---- process groups --------------------------------------------------------------------------------------------------


def test_a_group_is_found_under_a_second_name(mesh_of_one: dist.DeviceMesh) -> None:
    group = mesh_of_one.get_group()
    compat.register_group_alias("another name", group)
    assert compat.group_of("another name") is compat.group_of(group.group_name)
    gathered = torch.ops._c10d_functional.all_gather_into_tensor(torch.ones(2), 1, "another name")
    assert torch.equal(torch.ops._c10d_functional.wait_tensor(gathered), torch.ones(2))


def test_grouped_eager_collectives(mesh_of_one: dist.DeviceMesh) -> None:
    group = mesh_of_one.get_group()
    inputs = [torch.arange(4.0), torch.ones(3, 2)]
    for collective in (compat.all_gather_coalesced, lambda *a: compat.reduce_scatter_coalesced(*a, average=False)):
        outputs = [torch.empty_like(value) for value in inputs]
        collective(outputs, inputs, group).wait()
        for output, value in zip(outputs, inputs, strict=True):
            assert torch.equal(output, value)
    compat.all_reduce_coalesced(outputs, group, average=False).wait()  # in place; the sum over one rank
    assert all(map(torch.equal, outputs, inputs))


def test_a_wait_of_functional_collectives_waits_for_registered_work(mesh_of_one: dist.DeviceMesh) -> None:
    (output,) = outputs = [torch.zeros(4)]
    work = compat.all_gather_coalesced(outputs, [torch.arange(4.0)], mesh_of_one.get_group())
    before = torch._C._distributed_c10d._get_work_registry_size()
    compat.register_work(output, work)
    assert torch._C._distributed_c10d._get_work_registry_size() == before + 1
    assert torch.equal(torch.ops._c10d_functional.wait_tensor(output), torch.arange(4.0))
    assert torch._C._distributed_c10d._get_work_registry_size() == before


def test_the_backward_is_seen_and_its_end_calls_back() -> None:
    seen: list[str] = []

    def in_backward(grad: torch.Tensor) -> None:
        assert compat.is_in_backward()
        compat.call_after_backward(lambda: seen.append("end"))
        seen.append("hook")

    leaf = torch.ones(2, requires_grad=True)
    value = leaf * 2
    value.register_hook(in_backward)
    assert not compat.is_in_backward()
    value.sum().backward()
    assert seen == ["hook", "end"]


# ---- graphs ----------------------------------------------------------------------------------------------------------


def test_fake_modes_are_detected() -> None:
    with compat.FakeTensorMode() as mode:
        value = torch.ones(2)
    assert compat.detect_fake_mode([value]) is mode


def test_a_copied_dynamo_graph_keeps_sources_and_metadata() -> None:
    gm, _ = dynamo_graph(nn.Linear(2, 2), torch.ones(1, 2))
    copied = compat.copy_dynamo_graph(gm)
    for old, new in zip(gm.graph.nodes, copied.graph.nodes, strict=True):
        assert (old.name, old.op, hasattr(old, "_dynamo_source")) == (new.name, new.op, hasattr(new, "_dynamo_source"))
    assert copied.meta == gm.meta
    assert copied.graph is not gm.graph
    added = copied.graph.find_nodes(op="placeholder")[0]
    compat.set_dynamo_source(added)
    assert added._dynamo_source is None


def test_a_backward_graph_is_known_by_its_tangents() -> None:
    graph = fx.Graph()
    graph.placeholder("primals_1")
    assert not compat.is_backward_graph(graph)
    graph.placeholder("tangents_1")
    assert compat.is_backward_graph(graph)
    assert not compat.is_backward_graph(trace(lambda x: x + 1, torch.ones(2)).graph)


@pytest.mark.usefixtures("mesh_of_one")
def test_phases_of_real_graphs_are_recognized() -> None:
    assert [graph.phase for graph in transformer_record().graphs] == ["forward", "backward"]


def test_a_boxed_function_is_marked() -> None:
    def function(args: list[object]) -> None:
        args.clear()

    assert compat.wrap_boxed(function) is function
    assert function._boxed_call is True  # type: ignore[attr-defined]


def test_hashes_of_files_differ_with_their_content(tmp_path: pathlib.Path) -> None:
    one, other = tmp_path / "one.py", tmp_path / "other.py"
    one.write_text("a = 1")
    other.write_text("a = 2")
    assert compat.get_hash_for_files((str(one),)) != compat.get_hash_for_files((str(other),))


def test_pytrees() -> None:
    tree = {"a": [torch.ones(1), 2], "b": (torch.zeros(1),)}
    assert len(compat.tree_leaves(tree)) == 3
    assert compat.tree_map_only(torch.Tensor, lambda tensor: "tensor", tree) == {"a": ["tensor", 2], "b": ("tensor",)}


# ---- Inductor --------------------------------------------------------------------------------------------------------


def test_inductors_own_schedulers_are_switched_off_where_they_exist() -> None:
    off = compat.inductor_schedulers_off()
    assert set(off.values()) <= {False, "none"}
    assert "bucket_all_gathers_fx" in off
    with torch._inductor.config.patch(off):  # refuses unknown names
        pass


def test_deterministic_mode_is_seen() -> None:
    assert not compat.is_deterministic({})
    assert compat.is_deterministic({"deterministic": True})
    with torch._inductor.config.patch(deterministic=True):
        assert compat.is_deterministic({})
        assert not compat.is_deterministic({"deterministic": False})


def test_the_scheduler_hooks_are_reached_by_a_compilation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each function about Inductor's scheduler runs, and sees every kind of node."""
    kinds: set[str] = set()
    called: set[str] = set()

    def counted(name: str, original: object) -> object:
        def call(*args: object) -> object:
            called.add(name)
            result = original(*args)  # type: ignore[operator]
            if name == "scheduler_node_kind":
                kinds.add(result)
            return result

        return call

    names = {
        "scheduled_fx_nodes": ["passes.pin_schedule", "passes.fence_reductions"],
        "scheduler_node_kind": ["schedule", "passes.fence_reductions"],
        "collective_name": ["schedule"],
        "add_order_dependency": ["passes.fence_reductions"],
        "refresh_ancestors": ["passes.fence_reductions"],
        "scheduled_graph_module": ["pipeline"],
        "compile_fx_and_inspect": ["backend"],
    }
    for name, modules in names.items():
        for module in modules:
            monkeypatch.setattr(f"fsdp_passes.{module}.{name}", counted(name, getattr(compat, name)))
    with process_group("fake", torch.testing._internal.distributed.fake_pg.FakeStore(), 8):
        generated_code(sharded_transformer(dim=64, layers=2), torch.arange(4))
    assert called == names.keys()
    assert kinds == {"collective", "wait", "region", "compute", "none"}


@pytest.mark.usefixtures("mesh_of_one")
def test_what_compiles_without_inductor_is_reached() -> None:
    layer = fully_shard(nn.Linear(2, 2))
    for inner in ("aot_eager", "eager"):
        torch._dynamo.reset()
        torch.compile(layer, backend=overlap_fsdp, options={"inner": inner})(torch.ones(1, 2)).sum().backward()


def test_a_backward_can_be_compiled_with_its_forward() -> None:
    seen = []

    def compiler(gm: torch.fx.GraphModule, _: object) -> object:
        seen.append(gm)
        return compat.wrap_boxed(lambda args: gm(*args))

    backend = compat.aot_autograd(fw_compiler=compiler, bw_compiler=compiler)
    with compat.backwards_at_once():
        torch.compile(lambda x: x.sin(), backend=backend)(torch.ones(2, requires_grad=True))
    assert len(seen) == 2


def test_equal_sizes_can_be_two_symbols() -> None:
    symbols = []

    def backend(gm: torch.fx.GraphModule, _: object) -> object:
        symbols.extend(str(dim) for node in gm.graph.find_nodes(op="placeholder") for dim in _shape(node))
        return gm.forward

    x = torch.ones(6, 6)
    compat.mark_dynamic(x, 0)
    compat.mark_dynamic(x, 1)
    with compat.symbols_apart():
        torch.compile(lambda x: x.sin(), backend=backend)(x)
    assert len(set(symbols)) == 2
    assert not any(symbol.isdigit() for symbol in symbols)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_what_the_system_refuses_in_the_folder_of_the_compile_cache(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/caches")
    anywhere, inside = OSError(number, "refused"), OSError(number, "refused", "/caches/ab/code.py")
    assert compat.compile_cache_failure(anywhere) == ("/caches", anywhere)
    packed = torch._inductor.exc.InductorError(inside, None)
    assert compat.compile_cache_failure(packed) == ("/caches", inside)
    assert compat.compile_cache_failure(OSError(number, "refused", "/elsewhere/data")) is None
    assert compat.compile_cache_failure(FileNotFoundError(errno.ENOENT, "no compiler", "g++")) is None
    assert compat.compile_cache_failure(ValueError()) is None


def _shape(node: torch.fx.Node) -> list[object]:
    value = node.meta["example_value"]
    return list(value.shape) if isinstance(value, torch.Tensor) else []


def test_a_text_is_made_for_the_structured_trace_only() -> None:
    trace_log = logging.getLogger("torch.__trace")
    handlers, trace_log.handlers = trace_log.handlers, []
    made = []
    try:
        compat.trace_artifact("nobody", lambda: made.append("nobody") or "")
        assert made == []
        trace_log.addHandler(logging.NullHandler())
        compat.trace_artifact("somebody", lambda: made.append("somebody") or "")
    finally:
        trace_log.handlers = handlers
    assert made == ["somebody"]


def test_a_fake_process_group_of_any_size() -> None:
    compat.init_fake_process_group(1000)
    assert dist.get_world_size() == 1000
    dist.destroy_process_group()


def test_transforms_of_torch_func_are_seen_through_and_left() -> None:
    seen: list[list[torch.Tensor]] = []

    def function(x: torch.Tensor) -> torch.Tensor:
        seen.append(compat.inside_transforms(x))
        with compat.outside_transforms():
            assert len(compat.inside_transforms(torch.ones(2).clone())) == 1
        return x.sum()

    torch.func.grad(lambda x: torch.func.vmap(function)(x).sum())(torch.ones(3, 2))
    (levels,) = seen
    assert [tuple(level.shape) for level in levels] == [(2,), (3, 2), (3, 2)]
    plain = torch.ones(2)
    assert compat.inside_transforms(plain)[0] is plain
    assert len(compat.inside_transforms(plain)) == 1


def test_tangents_of_forward_mode_are_found_where_it_runs() -> None:
    x, direction = torch.ones(2), torch.full((2,), 3.0)
    assert compat.tangents_of([x]) == []
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, direction)
        (tangent,) = compat.tangents_of([2 * dual, x, torch.arange(2), None, 1])
    assert torch.equal(tangent, 2 * direction)
