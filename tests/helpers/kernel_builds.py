"""Compiles Triton kernels for a GPU that is not there: those that some work launches, with the arguments of the launch."""

import re
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

H100 = GPUTarget("cuda", 90, 32)
TYPES = {
    torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.int64: "*i64", torch.bool: "*i1",
}  # fmt: skip
LAUNCH = ("num_warps", "num_stages")


class Build(NamedTuple):
    """A compiled kernel: registers of a thread, bytes of its stack (what does not fit into registers), bytes of shared
    memory of a block."""

    name: str
    registers: int
    stack: int
    shared: int


def launches(work: Callable[[], Any], monkeypatch) -> list[tuple[JITFunction, dict[str, Any]]]:
    """The kernels that `work` launches, with their arguments by name; none of them runs."""
    found: list[tuple[JITFunction, dict[str, Any]]] = []

    def record(kernel, *args, grid, warmup, **options):
        found.append((kernel, dict(zip(kernel.arg_names, args, strict=False)) | options))

    monkeypatch.setattr(JITFunction, "run", record)
    work()
    return found


def built(kernel: JITFunction, arguments: dict[str, Any]) -> Build:
    """The kernel as the launcher would compile it for these arguments on an H100."""
    signature: dict[str, str] = {}
    constants: dict[tuple[int], Any] = {}
    attributes: dict[tuple[int], Any] = {}
    for number, parameter in enumerate(kernel.params):
        value = arguments[parameter.name]
        is_one = isinstance(value, int) and value == 1 and not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or is_one:
            signature[parameter.name], constants[number,] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name], attributes[number,] = TYPES[value.dtype], [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[parameter.name] = "fp32"
        else:
            signature[parameter.name] = "i32"
            if value % 16 == 0 and not parameter.do_not_specialize:
                attributes[number,] = [["tt.divisibility", 16]]
    options = {name: arguments[name] for name in LAUNCH if name in arguments}
    compiled = triton.compile(ASTSource(kernel, signature, constants, attributes), target=H100, options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", text).groups()
    return Build(kernel.__name__, int(registers), int(stack), compiled.metadata.shared)
