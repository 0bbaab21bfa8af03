"""The architecture that the package shows: imports go down, and a forward pass meets few files and
types."""

import ast
import inspect
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import torch

import hf_infini
from decoders import decoder
from hf_infini import patch_model
from models import token_ids

ROOT = Path(hf_infini.__file__).parent
# from the bottom up
ROOMS = ("options", "ops", "compat", "cache", "layers", "models", "tools", "command")
# What one forward pass of a patched Llama meets at most
FILES, TYPES = 12, 19


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__")


def imports_of(path: Path, modules: dict[str, Path]) -> set[str]:
    """The modules of the package that a module imports, also within its functions, but not only for
    types."""
    found, package = set(), name_of(path).split(".")[: None if path.name == "__init__.py" else -1]
    waiting: list[ast.AST] = [ast.parse(path.read_text("utf-8"))]
    while waiting:
        node = waiting.pop()
        if not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
            waiting += ast.iter_child_nodes(node)
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(
                [*package[: len(package) + 1 - node.level], node.module or ""]
                if node.level
                else [node.module]
            )
            names = [
                f"{base}.{alias.name}".replace("..", ".")
                for alias in node.names
                if alias.name != "__version__"
            ]
            found |= {name if name in modules else base for name in names}
    return found & modules.keys()


def test_imports_go_down_without_circles():
    modules = {name_of(path): path for path in ROOT.rglob("*.py")}
    graph = {name: imports_of(path, modules) for name, path in modules.items()}
    assert len(graph) > 40 and sum(map(len, graph.values())) > 100
    rank = {name: ROOMS.index(name.split(".")[1]) for name in graph if "." in name} | {
        ROOT.name: len(ROOMS)
    }
    assert {rank[name] for name in graph} == {*range(len(ROOMS) + 1)}
    upwards = {
        (name, other)
        for name, others in graph.items()
        for other in others
        if rank[other] > rank[name]
    }
    assert not upwards
    list(TopologicalSorter(graph).static_order())  # CycleError, which names the modules


def met_in(call) -> tuple[set[str], set[str], set[str]]:
    """The files and functions of the package that a call enters, and the types that it meets there:
    whose methods run, and of what the functions have in their variables and return, also in a
    tuple, list or dictionary."""
    files, functions, types = set(), set(), set()

    def note(value) -> None:
        inside = (
            value.values()
            if isinstance(value, dict)
            else value
            if isinstance(value, (list, tuple))
            else ()
        )
        for kind in (value, type(value), *map(type, inside)):
            if isinstance(kind, type) and kind.__module__.startswith(ROOT.name):
                types.add(kind.__qualname__)

    def trace(frame, event: str, value) -> None:
        code, path = frame.f_code, Path(frame.f_code.co_filename)
        if event in ("call", "return") and path.is_relative_to(ROOT):
            files.add(str(path.relative_to(ROOT)))
            functions.add(f"{path} {code.co_qualname}")
            note(getattr(inspect.getmodule(code), code.co_qualname.split(".")[0], None))
            for variable in (*list(frame.f_locals.values()), value):
                note(variable)

    sys.setprofile(trace)
    try:
        call()
    finally:
        sys.setprofile(None)
    return files, functions, types


@torch.no_grad()
def test_a_forward_pass_meets_few_files_and_types():
    model = patch_model(decoder("llama", num_hidden_layers=2), segment_length=4)
    files, functions, types = met_in(lambda: model(token_ids(1, 19)))
    print(
        f"\n{len(files)} files, {len(functions)} functions, {len(types)} types: "
        f"{sorted(files)}, {sorted(types)}"
    )
    assert 5 < len(files) <= FILES and 10 < len(types) <= TYPES
