"""Check that imports inside the package go one way, and that PyTorch's internals stay in one file.

    python tools/check_imports.py [FOLDER]

The rules, for every module of the package (default: fsdp_passes beside this folder):
  - no two modules import each other, directly or through others;
  - a pass imports no other pass, not the backend, and touches no torch.cuda; files with a leading underscore in
    passes/ are what passes share;
  - only the package itself, the command line and inspect/ import inspect/;
  - only _torch_compat.py uses names of torch with a leading underscore.
"""

from __future__ import annotations

import ast
import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path

COMPAT = "_torch_compat"
# Not internal in practice: operators, whose own names may begin with an underscore, their types, which have no other
# name, their schema; the tables of nn.Module; the version counter that the notes on autograd describe; the methods of
# named tuples.
ALLOWED_PREFIXES = ("torch.ops.", "torch._ops.OpOverload", "torch._ops.HigherOrderOperator")
ALLOWED_ATTRIBUTES = {"_schema", "_parameters", "_buffers", "_modules", "_version", "_replace", "_fields"}


@dataclasses.dataclass
class Module:
    """One source file: its name below the package ("passes.pin_schedule"), and what its names mean."""

    name: str
    path: Path
    tree: ast.Module
    imports: list[tuple[int, str]]  # line, dotted name of an imported module or of a name in it
    names: dict[str, str]  # local name -> dotted name


def read_modules(package: Path) -> list[Module]:
    """Every module of the package in `package`."""
    modules = []
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        tree = ast.parse(path.read_text(), str(path))
        imports, names = [], {}
        for node in _run_time_nodes(tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    imports.append((node.lineno, alias.name))
                    names[alias.asname or alias.name.split(".")[0]] = (
                        alias.name if alias.asname else alias.name.split(".")[0]
                    )
            elif isinstance(node, ast.ImportFrom):
                base = node.module or ""
                if node.level:
                    depth = len(parts) - node.level
                    base = ".".join(filter(None, [package.name, *parts[:depth], base]))
                for alias in node.names:
                    imports.append((node.lineno, f"{base}.{alias.name}"))
                    names[alias.asname or alias.name] = f"{base}.{alias.name}"
        for node in tree.body:  # aten = torch.ops.aten
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                dotted = _dotted_name(node.value, names)
                if dotted is not None:
                    names[node.targets[0].id] = dotted
        modules.append(Module(name, path, tree, imports, names))
    _follow_own_names(modules, package.name)
    return modules


def _follow_own_names(modules: list[Module], package: str) -> None:
    """What a module imports from another of ours is what that one means by the name."""
    by_name = {module.name: module for module in modules}
    for module in modules:
        for local, dotted in list(module.names.items()):
            owner, _, name = dotted.removeprefix(package + ".").rpartition(".")
            if dotted.startswith(package + ".") and owner in by_name and owner != COMPAT:
                module.names[local] = by_name[owner].names.get(name, dotted)


def _run_time_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those under `if TYPE_CHECKING`."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        yield child
        yield from _run_time_nodes(child)


def find_violations(package: Path) -> list[str]:
    """`file:line: what is wrong`, for every broken rule in the package's folder."""
    modules = read_modules(package)
    known = {module.name for module in modules}
    found: list[tuple[Path, int, str]] = []
    edges: dict[str, dict[str, int]] = {module.name: {} for module in modules}
    own_names = {name for module in modules for name in _own_underscore_names(module.tree)}
    for module in modules:
        for line, target in module.imports:
            imported = _module_of(target, package.name, known)
            if imported is None or imported == module.name:
                continue
            edges[module.name].setdefault(imported, line)
            found += [(module.path, line, text) for text in _broken_layers(module.name, imported)]
        found += [(module.path, line, text) for line, text in _uses_of_torch(module, own_names)]
    paths = {module.name: module.path for module in modules}
    for cycle in _cycles(edges):
        where = cycle[0]
        found.append((paths[where], edges[where][cycle[1]], f"modules import each other: {' -> '.join(cycle)}"))
    root = package.parent
    return [f"{path.relative_to(root)}:{line}: {text}" for path, line, text in sorted(set(found))]


def _module_of(target: str, package: str, known: set[str]) -> str | None:
    """The module of ours that an imported dotted name lies in, "" being the package itself."""
    if target != package and not target.startswith(package + "."):
        return None
    name = target.removeprefix(package).removeprefix(".")
    while name not in known:
        name = name.rpartition(".")[0]
    return name


def _broken_layers(importer: str, imported: str) -> Iterator[str]:
    is_pass = importer.startswith("passes.")
    if is_pass and imported == "backend":
        yield "a pass imports the backend"
    if is_pass and imported.startswith("passes.") and not imported.split(".")[1].startswith("_"):
        yield f"a pass imports another pass, {imported}; what passes share belongs in passes/_*.py"
    is_inspect = imported.split(".")[0] == "inspect"
    if is_inspect and importer.split(".")[0] not in ("", "__main__", "inspect"):
        yield f"only __init__.py, __main__.py and inspect/ may import {imported}"


def _own_underscore_names(tree: ast.Module) -> Iterator[str]:
    """Names with a leading underscore that the package defines itself."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value):
            yield node.attr


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls", "ctx")


def _uses_of_torch(module: Module, own_names: set[str]) -> Iterator[tuple[int, str]]:
    """Broken rules about torch in one module."""
    dotted = [(line, name) for line, name in module.imports if name.split(".")[0] == "torch"]
    inner: set[ast.AST] = set()  # parts of a longer chain
    for node in _run_time_nodes(module.tree):
        if not isinstance(node, ast.Attribute):
            continue
        chain = _dotted_name(node, module.names)
        if chain is not None and chain.split(".")[0] == "torch":
            if node not in inner:
                dotted.append((node.lineno, chain))
            inner.update(ast.walk(node))
        elif module.name != COMPAT and _is_foreign_internal(node, own_names):
            yield node.lineno, f"the internal attribute {node.attr} belongs in {COMPAT}.py"
    for line, name in dotted:
        if module.name.startswith("passes.") and (name + ".").startswith("torch.cuda."):
            yield line, f"a pass touches CUDA: {name}"
        is_internal = any(part.startswith("_") and not part.startswith("__") for part in name.split("."))
        if module.name != COMPAT and is_internal and not name.startswith(ALLOWED_PREFIXES):
            yield line, f"the internal name {name} belongs in {COMPAT}.py"


def _dotted_name(node: ast.expr, names: dict[str, str]) -> str | None:
    """`dist.group` with `import torch.distributed as dist` -> "torch.distributed.group"."""
    if isinstance(node, ast.Attribute):
        base = _dotted_name(node.value, names)
        return f"{base}.{node.attr}" if base else None
    return names.get(node.id) if isinstance(node, ast.Name) else None


def _is_foreign_internal(node: ast.Attribute, own_names: set[str]) -> bool:
    """An underscore attribute of somebody else's object. Our own marks on their objects are called _fsdp_…"""
    name = node.attr
    return (
        name.startswith("_")
        and not name.startswith(("__", "_fsdp"))
        and name not in own_names | ALLOWED_ATTRIBUTES
        and not _is_self(node.value)
    )


def _cycles(edges: dict[str, dict[str, int]]) -> Iterator[list[str]]:
    """One cycle for each import that closes one, found depth first."""
    done: set[str] = set()

    def visit(name: str, trail: list[str]) -> Iterator[list[str]]:
        if name in trail:
            yield [*trail[trail.index(name) :], name]
        elif name not in done:
            for target in sorted(edges[name]):
                yield from visit(target, [*trail, name])
            done.add(name)

    for name in sorted(edges):
        yield from visit(name, [])


def main(argv: list[str] | None = None) -> int:
    """Print what is wrong; 1 when anything is."""
    argv = sys.argv[1:] if argv is None else argv
    package = Path(argv[0]) if argv else Path(__file__).parent.parent / "fsdp_passes"
    violations = find_violations(package)
    print("\n".join(violations) or f"imports of {package.name} go one way")
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
