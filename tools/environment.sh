# Sourced by the other tools: set_up EXTRA makes $PYTHON an interpreter with torch, this package and its extra EXTRA.

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$ROOT"

say() { printf '%s\n' "$*" >&2; }

# Whether interpreter $1 has a torch that this package can use.
has_torch() {
    "$1" - 2>/dev/null <<'PY'
import sys
import torch
sys.exit(tuple(int(part) for part in torch.__version__.split(".")[:2]) < (2, 11))
PY
}

# Whether interpreter $1 has this very package, and all that pyproject.toml asks for with the extra $2.
has_package() {
    "$1" - "$2" 2>/dev/null <<'PY'
import pathlib, sys
sys.path = [path for path in sys.path if path]  # the installed package, not the folder that we are in
from importlib.metadata import distribution
from pip._vendor.packaging.requirements import Requirement
try:
    import tomllib
except ImportError:
    from pip._vendor import tomli as tomllib
import fsdp_passes
assert pathlib.Path(fsdp_passes.__file__).parent.parent == pathlib.Path.cwd()
project = tomllib.loads(pathlib.Path("pyproject.toml").read_text())["project"]
for text in project["dependencies"] + project["optional-dependencies"][sys.argv[1]]:
    requirement = Requirement(text)
    assert requirement.specifier.contains(distribution(requirement.name).version, prereleases=True)
PY
}

# Whether interpreter $1 belongs to a virtual environment into which the package may be installed.
is_usable_environment() {
    "$1" - 2>/dev/null <<'PY'
import importlib.util, pathlib, sys
sys.path = [path for path in sys.path if path]
import pip
assert sys.prefix != sys.base_prefix
# One that serves another checkout is left alone.
spec = importlib.util.find_spec("fsdp_passes")
assert spec is None or pathlib.Path(spec.origin).parent.parent == pathlib.Path.cwd()
PY
}

# Inductor compiles C++ for the CPU.
check_compiler() {
    if ! command -v "${CXX:-g++}" >/dev/null && ! command -v clang++ >/dev/null; then
        say "Expected a C++ compiler, which torch.compile needs on the CPU; found neither g++ nor clang++. Install one."
        exit 1
    fi
    if ! "$PYTHON" -c 'import pathlib, sysconfig, sys; sys.exit(not pathlib.Path(sysconfig.get_path("include"), "Python.h").exists())'; then
        say "Expected Python's header files (Python.h), which torch.compile needs on the CPU; found none for $PYTHON."
        say "Install them, for example as the package python3-dev."
        exit 1
    fi
}

set_up() {
    local extra=$1 base flags=()
    base=$(command -v python3) || { say "Expected python3, 3.10 or newer, on the PATH; found none."; exit 1; }
    if ! "$base" -c 'import sys; sys.exit(sys.version_info < (3, 10))'; then
        say "Expected Python 3.10 or newer, found $("$base" --version) ($base)."
        exit 1
    fi
    PYTHON=$base
    if ! has_torch "$base" || ! is_usable_environment "$base"; then
        PYTHON=$ROOT/.venv/bin/python
        if ! "$PYTHON" -c '' 2>/dev/null; then
            if has_torch "$base"; then flags=(--system-site-packages); fi
            say "Making a virtual environment in .venv ..."
            "$base" -m venv --clear "${flags[@]}" .venv
        fi
    fi
    if ! has_torch "$PYTHON"; then
        say "Installing torch ..."
        if nvidia-smi -L 2>/dev/null | grep -q GPU; then
            "$PYTHON" -m pip install --quiet 'torch>=2.11'
        else
            "$PYTHON" -m pip install --quiet 'torch==2.13.0'
        fi
    fi
    if ! has_package "$PYTHON" "$extra"; then
        say "Installing fsdp_passes[$extra] ..."
        "$PYTHON" -m pip install --quiet --editable ".[$extra]"
    fi
    check_compiler
    export PYTHON
}
