"""A state as a page of vLLM's cache, and the plugin's entry point, without vLLM."""

import importlib
import subprocess
import sys
import tomllib
from math import prod
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig

from cases import examples
from decoders import SIZES, decoder
from hf_infini import cache_bytes, patch_model
from hf_infini.cache.files import first_states
from hf_infini.models import families
from hf_infini.options import KEEP_SCORES, UPDATE_RULES
from hf_infini.tools.vllm import FAMILIES
from hf_infini.tools.vllm.pages import pages_of, places

ROOT = Path(__file__).parents[2]


def bound(pages: torch.Tensor, page) -> list[torch.Tensor]:
    """Views of all pages, `[pages, bytes]`, for each tensor, as vLLM's `MambaBase.bind_kv_cache`
    makes them."""
    views, offset = [], 0
    for shape, dtype in zip(page.shapes, page.dtypes, strict=True):
        size = prod(shape) * dtype.itemsize
        views.append(pages[:, offset : offset + size].view(dtype).view(-1, *shape))
        offset += size
    return views


@st.composite
def memories(draw) -> dict:
    """Options of a memory in a model of two layers."""
    rule = draw(st.sampled_from(UPDATE_RULES))
    options = {"segment_length": draw(st.integers(3, 8)), "update_rule": rule}
    options |= {name: draw(st.integers(0, 2)) for name in ("local_segments", "sink_tokens")}
    options |= {"memory_conv": draw(st.integers(0, 3))}
    options |= {"mask_special_tokens": draw(st.booleans())}
    if draw(st.booleans()):
        options |= {"kept_tokens": draw(st.integers(1, 5))}
        options |= {"keep_score": draw(st.sampled_from(KEEP_SCORES))}
        options |= {"kept_shares": draw(st.none() | st.just([1, 0.4]))}
    if rule == "linear" and draw(st.booleans()):
        options |= {"feature_map": "exp", "memory_write": "learned"}
    return options


def sorted_run(numbers: list[int]) -> list[int]:
    return [*range(numbers[0], numbers[0] + len(numbers))]


def random_like(tensor: torch.Tensor) -> torch.Tensor:
    """Any bits of this dtype, none of them a NaN, and three rows."""
    shape = (3, *tensor.shape[1:])
    if tensor.dtype == torch.bool:
        return torch.rand(shape) < 0.5
    if not tensor.is_floating_point():
        return torch.randint(-1, 2**40, shape)
    return torch.randn(shape, dtype=torch.float64).to(tensor.dtype)


@examples(50)
@given(
    options=memories(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
    skipped=st.booleans(),
    numbers=st.permutations(range(6)).map(lambda order: order[:3]) | st.just([2, 3, 4]),
    in_place=st.booleans(),
)
def test_a_state_comes_back_bit_for_bit_from_its_page(options, dtype, skipped, numbers, in_place):
    """Three rows go into pages of six, in any order; the pages beside them stay as they were."""
    config = families.InfiniLlamaConfig(**SIZES | {"num_hidden_layers": 2}, dtype=dtype, **options)
    found, firsts = pages_of(config, dtype), first_states(config, 3, dtype)
    assert [*found] == config.infini_layers
    size = max(each.nbytes for each in found.values())
    for layer, page in found.items():
        state = firsts[layer].map(random_like)
        if skipped and config.mask_special_tokens:
            state = state.having(local_skipped=torch.rand(3, state.local_key.shape[2]) < 0.5)
        raw = torch.randint(-128, 127, (6, size), dtype=torch.int8)
        others, before = [*{*range(6)} - {*numbers}], raw.clone()
        pages = places(numbers, in_place, raw.device)
        page.write(bound(raw, page), pages, state)
        assert raw[others].equal(before[others])
        again = page.read(bound(raw, page), pages)
        if state.local_skipped is None and again.local_skipped is not None:
            state = state.having(local_skipped=torch.zeros_like(again.local_skipped))
        wanted, read = state.tensors(), again.tensors()
        assert wanted.keys() == read.keys()
        for name, tensor in wanted.items():
            assert read[name].dtype == tensor.dtype and read[name].equal(tensor), name
        # pages side by side are the state: what is written into it, they hold
        assert isinstance(pages, slice) == (in_place and numbers == sorted_run(numbers))
        again.local_key.zero_()
        assert page.read(bound(raw, page), pages).local_key.any() != isinstance(pages, slice)
        page.write(bound(raw, page), pages, again)
        assert not page.read(bound(raw, page), pages).local_key.any()
    # nothing that a cache does not hold, but for the alignment and which tokens were special
    room = sum(window.places for window in config.windows.values())
    extra = room * config.mask_special_tokens + 8 * len(found)
    held = sum(page.nbytes for page in found.values())
    assert cache_bytes(config) <= held <= cache_bytes(config) + extra


@pytest.mark.slow
def test_the_entry_point_is_found_without_importing_vllm():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    [entry] = project["entry-points"]["vllm.general_plugins"].values()
    module, _, function = entry.partition(":")
    assert callable(getattr(importlib.import_module(module), function))
    code = (
        f"import sys, hf_infini; assert '{module}' not in sys.modules; import {module}; "
        "assert 'vllm' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=300)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_saved_model_names_the_class_that_the_plugin_registers(model_type, tmp_path):
    model = patch_model(decoder(model_type), segment_length=4)
    model.save_pretrained(tmp_path)
    config = AutoConfig.from_pretrained(tmp_path)
    assert config.architectures == [f"Infini{FAMILIES[model_type]}"]
