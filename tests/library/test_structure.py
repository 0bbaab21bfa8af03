"""The architecture that the package shows: imports go down, and a forward pass meets few files and
types."""

import ast
import functools
import inspect
import re
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
import torch

import hf_infini
from decoders import decoder
from hf_infini import patch_model
from hf_infini.ops.rules import RULES
from models import token_ids

ROOT = Path(hf_infini.__file__).parent
TRITON = ("agreement", "attend", "backward", "forward", "parts")
# from the bottom up
ROOMS = ("options", "ops", "compat", "cache", "layers", "models", "tools", "command")
# What one forward pass of a patched Llama meets at most, in the setting that the README shows: with
# sinks, kept tokens and a cache
FILES, TYPES = 12, {"none": 18, "linear": 20}
LINES = 60  # of a function, without its docstring


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__")


def imported_by_name(call: ast.Call, module: str, package: str, modules: dict) -> set[str]:
    """The modules of the package that `import_module` may import, whatever it fills in; in no other
    way is a module imported by its name."""
    if not ast.unparse(call.func).endswith("import_module"):
        return set()
    [name, *_], pattern = call.args, ""
    for part in name.values if isinstance(name, ast.JoinedStr) else [name]:
        filled_in = isinstance(part, ast.FormattedValue) and ast.unparse(part.value)
        pattern += (
            re.escape(ast.literal_eval(part))
            if not filled_in
            else re.escape(module)
            if filled_in == "__name__"
            else r"\w+"
        )
    pattern = re.escape(package) + pattern if pattern.startswith(r"\.") else pattern
    found = {other for other in modules if re.fullmatch(pattern, other)}
    assert found, f"{module} imports {ast.unparse(name)}, which is no module"
    return found


def imports_of(path: Path, modules: dict[str, Path]) -> set[str]:
    """The modules of the package that a module imports, also within its functions and by name, but
    not only for types."""
    found, package = set(), name_of(path).split(".")[: None if path.name == "__init__.py" else -1]
    waiting: list[ast.AST] = [ast.parse(path.read_text("utf-8"))]
    while waiting:
        node = waiting.pop()
        if not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"):
            waiting += ast.iter_child_nodes(node)
        if isinstance(node, ast.Call):
            found |= imported_by_name(node, name_of(path), ".".join(package), modules)
        elif isinstance(node, ast.Import):
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
    by_name = {name for name in graph["hf_infini.ops.backends"] if "triton" in name}
    assert by_name == {f"hf_infini.ops.backends.triton.{name}" for name in TRITON}
    rules = {f"hf_infini.ops.rules.{name}" for name in RULES if name != "linear"}
    assert rules and rules <= graph["hf_infini.ops.rules"]


@pytest.mark.parametrize("path", sorted(ROOT.rglob("*.py")), ids=name_of)
def test_bodies_are_short(path):
    functions = [
        node
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    ]
    for function in functions:
        body = function.body[ast.get_docstring(function) is not None :]
        lines = body[-1].end_lineno - body[0].lineno + 1 if body else 0
        assert lines <= LINES, f"{function.name} has {lines} lines"


def unnamed_parameters() -> list[str]:
    """The parameters of public functions that neither the docstring of the function nor of its
    class names, nor, of a method without a docstring, that of the one it overrides. The commands'
    are explained by their help."""
    trees = {
        path: ast.parse(path.read_text("utf-8"))
        for path in ROOT.rglob("*.py")
        if path.parent.name != "triton" and path.name != "command.py"
    }
    classes = {
        node.name: node
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }

    def docstrings(function: ast.FunctionDef, owner: ast.ClassDef | None) -> str:
        own = (
            f"{ast.get_docstring(function) or ''} {ast.get_docstring(owner) or '' if owner else ''}"
        )
        overridden = [
            (method, base)
            for each in ([] if ast.get_docstring(function) or owner is None else owner.bases)
            if (base := classes.get(ast.unparse(each).split(".")[-1])) not in (None, owner)
            for method in base.body
            if isinstance(method, ast.FunctionDef) and method.name == function.name
        ]
        return " ".join([own, *(docstrings(*each) for each in overridden)])

    found = []
    for path, tree in trees.items():
        owners = [None, *(node for node in tree.body if isinstance(node, ast.ClassDef))]
        for owner in owners:
            for function in (tree if owner is None else owner).body:
                if not isinstance(function, ast.FunctionDef) or (
                    function.name.startswith("_") and function.name != "__init__"
                ):
                    continue
                given, said = function.args, docstrings(function, owner)
                found += [
                    f"{name_of(path)}.{function.name}: {each.arg}"
                    for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)
                    if each.arg not in ("self", "cls", "ctx")
                    and not re.search(rf"\b{each.arg}\b", said)
                ]
    return found


def test_docstrings_name_the_parameters():
    found = unnamed_parameters()
    print(*found, sep="\n")
    assert not found


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
@pytest.mark.parametrize("tokens", [19, 1], ids=["prefill", "step"])
@pytest.mark.parametrize("update_rule", TYPES)
def test_a_forward_pass_meets_few_files_and_types(update_rule, tokens):
    window = {"segment_length": 4, "local_segments": 1, "sink_tokens": 2, "kept_tokens": 5}
    decoder_of_two = decoder("llama", num_hidden_layers=2)
    model = patch_model(decoder_of_two, **window, update_rule=update_rule)
    cache = model(token_ids(1, 19), use_cache=True).cache if tokens == 1 else None
    call = functools.partial(model, token_ids(1, tokens), cache=cache, use_cache=True)
    files, functions, types = met_in(call)
    print(
        f"\n{len(files)} files, {len(functions)} functions, {len(types)} types: "
        f"{sorted(files)}, {sorted(types)}"
    )
    assert 5 < len(files) <= FILES and 10 < len(types) <= TYPES[update_rule]
