"""The kernels compile for an H100, whether there is one or not, and keep what they work on in
registers.

    pip install --no-deps --target build/kernels triton==3.6.0
    PYTHONPATH=build/kernels pytest tests/library/test_kernels_compiled.py
"""

import importlib.util
import os

import pytest
import torch

from cases import plain_case, rotary_of
from hf_infini import infini_attention
from hf_infini.ops import backends

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") == "1",
    reason="needs Triton's compiler: the command is at the top of the file",
)
SHARED = 232_448  # bytes of shared memory that a block can have on an H100
# bytes of a thread that are spilled, at most, by the width: the gradients of queries and keys
STACK = {64: 512, 128: 1536}
LLAMA = {"heads": 4, "kv_heads": 2, "local_segments": 1, "sink_tokens": 4}
# Sizes, dtype, and how many kernels are built
CASES = {
    "GPT-2": ({"heads": 2, "kv_heads": 2, "width": 64}, torch.bfloat16, 7),
    "Llama": ({**LLAMA, "width": 64}, torch.bfloat16, 9),
    "Llama, wide": (
        {"heads": 4, "kv_heads": 2, "width": 128, "local_segments": 1},
        torch.bfloat16,
        8,
    ),
    "narrow values": (
        {"heads": 4, "kv_heads": 2, "width": 128, "value_width": 32},
        torch.bfloat16,
        7,
    ),
    "GPT-2, float32": ({"heads": 2, "kv_heads": 2, "width": 64}, torch.float32, 7),
    "Llama, kept": ({**LLAMA, "width": 64, "kept_tokens": 200}, torch.bfloat16, 10),
    "Llama, wide, kept": ({**LLAMA, "width": 128, "kept_tokens": 200}, torch.bfloat16, 10),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_they_fit_on_an_h100(name, monkeypatch):
    from hf_infini.ops.backends.triton import attend
    from kernel_builds import built, launches

    sizes, dtype, count = CASES[name]
    case = plain_case(batch=1, tokens=1024, segment_length=256, dtype=dtype, **sizes)
    if name.startswith("Llama"):
        case.options["rotary"] = rotary_of(256, case.options, sizes["width"], torch.float32)
    monkeypatch.setattr(backends, "BACKENDS", {"triton": (lambda call: (True, ""), attend.run)})

    def train():
        output, _ = case.call(infini_attention, case.leaves())
        output.sum().backward()

    found = [built(*launch) for launch in launches(train, monkeypatch)]
    assert len({build.name for build in found}) == count
    for build in found:
        assert build.shared <= SHARED and build.stack <= STACK[sizes["width"]], build
