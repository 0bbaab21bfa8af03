"""Compiles Triton kernels for a GPU that is not there: those that some work launches, with the
arguments of the launch."""

import re
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

H100 = GPUTarget("cuda", 90, 32)


class Build(NamedTuple):
    """A compiled kernel: registers of a thread, bytes of its stack (what does not fit into
    registers), bytes of shared memory of a block."""

    name: str
    registers: int
    stack: int
    shared: int


def launches(
    work: Callable[[], Any], monkeypatch
) -> list[tuple[JITFunction, tuple, dict[str, Any]]]:
    """The kernels that `work` launches, with their arguments and options; none of them runs."""
    found: list[tuple[JITFunction, tuple, dict[str, Any]]] = []

    def record(kernel, *args, grid, warmup, **options):
        found.append((kernel, args, options))

    monkeypatch.setattr(JITFunction, "run", record)
    work()
    return found


def built(kernel: JITFunction, arguments: tuple, options: dict[str, Any]) -> Build:
    """The kernel as the launcher would compile it for these arguments on an H100."""
    backend = make_backend(H100)
    binder = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, rest = binder(*arguments, **options)
    _, signature, constants, attributes = kernel._pack_args(
        backend, rest, bound, specialization, rest
    )
    compiled = triton.compile(
        ASTSource(kernel, signature, constants, attributes), target=H100, options=rest
    )
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        text = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", text).groups()
    return Build(kernel.__name__, int(registers), int(stack), compiled.metadata.shared)
