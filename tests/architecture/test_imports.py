"""The house rules that the source itself can be asked about (ARCHITECTURE.md)."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "src" / "stratagem"
MAX_LINES = 400

# Top to bottom: a room imports itself and the rooms below it. Rooms on one line do not know each
# other. `__init__` only collects public names.
ROOMS = (
    ("compat",),
    ("__init__", "cli"),
    ("launcher", "planning"),
    ("callbacks", "cluster_resolver", "debug", "experimental", "function", "nn", "train", "utils"),
    ("keras_bridge",),
    ("coordinator",),
    ("recovery",),
    ("strategies",),
    ("data",),
    ("step",),
    ("variables",),
    ("collectives",),
    ("values",),
    ("parameter_server",),
    ("transport",),
    ("cluster",),
    ("tpu",),
    ("config",),
    ("connect", "context", "device_strings"),
    ("_keras", "_jax", "_orbax"),
    ("errors",),
)

# In-function imports are for optional dependencies: file -> the modules it may import so.
OPTIONAL_IMPORTS: dict[str, set[str]] = {
    "cli/plan_plot.py": {"matplotlib"},
    "cluster/gce.py": {"google.auth", "googleapiclient"},
    "cluster/kubernetes.py": {"kubernetes"},
    "launcher/kubernetes.py": {"yaml"},
    "launcher/ray.py": {"ray"},
    "launcher/ray_task.py": {"ray"},
    # Jobs without large tables need no compiler.
    "parameter_server/kernels.py": {"numba"},
    # A parameter server rarely needs JAX, whose import takes seconds.
    "parameter_server/whole.py": {"jax"},
}

COLLECTIVES = {"psum", "ppermute", "all_gather", "psum_scatter", "all_to_all"}
# Private names of a library, and the only file that may use them.
PRIVATE = {
    "jax._src": "_jax.py",
    "jaxlib._jax": "_jax.py",
    "keras.src": "_keras.py",
    "orbax.checkpoint._src": "_orbax.py",
}

_LEVELS = {room: level for level, rooms in enumerate(ROOMS) for room in rooms}


def _files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def _name(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def _room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def _imported(node: ast.AST) -> list[str]:
    """The modules an import statement names; `from a import b` may mean a module `a.b`."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [f"{node.module}.{alias.name}" for alias in node.names]
    return []


def _dotted(node: ast.AST) -> str:
    """`jax.lax.psum` of the expression that reads so, else nothing."""
    if isinstance(node, ast.Attribute):
        left = _dotted(node.value)
        return f"{left}.{node.attr}" if left else ""
    return node.id if isinstance(node, ast.Name) else ""


def _mentions(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Every dotted name that the source reads or imports, with the local name spelled out."""
    nodes = list(ast.walk(tree))
    local: dict[str, str] = {}
    for node in nodes:
        for alias in node.names if isinstance(node, (ast.Import, ast.ImportFrom)) else ():
            module = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            yield node.lineno, module + alias.name
            if alias.asname or module:
                local[alias.asname or alias.name] = module + alias.name
    for node in nodes:
        if isinstance(node, ast.Attribute) and (name := _dotted(node)):
            first, dot, rest = name.partition(".")
            yield node.lineno, local.get(first, first) + dot + rest


def _violations(path: Path, source: str) -> list[str]:
    """What one file breaks, each as `file:line: what`."""
    name, room, tree = _name(path), _room(path), ast.parse(source)
    found: list[tuple[int, str]] = []
    if (lines := source.count("\n")) > MAX_LINES:
        found.append((lines, f"{lines} lines, at most {MAX_LINES}: split it by idea"))
    if room not in _LEVELS:
        found.append((1, f"room {room!r} is not in ROOMS of {Path(__file__).name}: add it there"))
    in_functions = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert):
            found.append((node.lineno, "assert in library code: raise an error that says more"))
        if isinstance(node, ast.ImportFrom) and node.level:
            found.append((node.lineno, "relative import: write the module's full name"))
            continue
        for module in _imported(node):
            if node in in_functions and not any(
                module == allowed or module.startswith(allowed + ".")
                for allowed in OPTIONAL_IMPORTS.get(name, ())
            ):
                found.append((node.lineno, f"import of {module} inside a function"))
            package, _, rest = module.partition(".")
            target = rest.partition(".")[0] or "__init__"
            if package != "stratagem" or target == room or room not in _LEVELS:
                continue
            if target not in _LEVELS:
                found.append((node.lineno, f"imports {module}, which is no room in ROOMS"))
            elif _LEVELS[target] <= _LEVELS[room]:
                found.append((node.lineno, f"imports {module}, but {target} is not below {room}"))
    for line, mention in _mentions(tree):
        if mention.startswith(("os.environ", "os.getenv", "os.putenv")) and name != "config.py":
            found.append((line, f"{mention} outside config.py"))
        last = mention.rpartition(".")[2]
        if mention in {f"jax.lax.{last}", f"jax._src.lax.parallel.{last}"}:
            if last.removesuffix("_p") in COLLECTIVES and room != "collectives":
                found.append((line, f"{mention} outside collectives/"))
        for private, home in PRIVATE.items():
            if f"{mention}.".startswith(f"{private}.") and name != home:
                found.append((line, f"{mention} outside {home}"))
    return [f"{name}:{line}: {what}" for line, what in sorted(set(found))]


@pytest.mark.parametrize("path", _files(), ids=_name)
def test_house_rules(path):
    assert _violations(path, path.read_text()) == []


def test_every_room_exists_once():
    names = [room for rooms in ROOMS for room in rooms]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(
    ("file", "source", "what"),
    [
        ("novel.py", "x = 1", "add it there"),
        ("values.py", "from stratagem.step import trace", "step is not below values"),
        ("values.py", "from stratagem import variables", "variables is not below values"),
        ("values.py", "import stratagem.novel", "no room in ROOMS"),
        ("_jax.py", "from stratagem import _keras", "_keras is not below _jax"),
        ("step/lower.py", "def f():\n    import numpy", "import of numpy inside a function"),
        ("step/lower.py", "from . import trace", "relative import"),
        ("step/lower.py", "assert True", "assert in library code"),
        ("step/lower.py", "x = 1\n" * 401, "401 lines"),
        ("step/lower.py", "import os\nos.environ['A']", "os.environ outside config.py"),
        ("step/lower.py", "from os import getenv", "os.getenv outside config.py"),
        ("step/lower.py", "import jax\njax.lax.psum(x, 'r')", "jax.lax.psum outside collectives/"),
        ("step/lower.py", "from jax import lax\nlax.all_gather(x)", "outside collectives/"),
        ("step/lower.py", "from jax.lax import ppermute as p", "outside collectives/"),
        ("step/lower.py", "import jax.lax as jl\njl.psum_scatter", "outside collectives/"),
        ("step/lower.py", "from jax._src import core", "jax._src.core outside _jax.py"),
        ("step/lower.py", "import jax\njax._src.core", "outside _jax.py"),
        ("_jax.py", "from keras.src import backend", "outside _keras.py"),
        ("_jax.py", "from orbax.checkpoint._src import futures", "outside _orbax.py"),
    ],
)
def test_the_rules_catch_what_breaks_them(file, source, what):
    found = _violations(PACKAGE / file, source)
    assert any(what in line for line in found), found


def test_the_rules_allow_what_they_should():
    source = "import jax\nfrom stratagem import errors, step\njax.lax.psum\njax.lax.axis_index"
    assert _violations(PACKAGE / "collectives" / "ring.py", source.replace(", step", "")) == []
    assert _violations(PACKAGE / "_jax.py", "from jax._src import core") == []
    assert _violations(PACKAGE / "config.py", "import os\nos.environ['A']") == []
