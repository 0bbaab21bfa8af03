"""Measurements of a run's machine: peak memory, versions, hardware, native bfloat16."""

import ctypes
import datetime
import os
import platform
import shlex
import sys
from pathlib import Path

import torch
import transformers

from .stages import peak_memory_bytes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h


def supports_bfloat16(on_cpu: bool) -> bool:
    """Whether bfloat16 matrix products are native here; emulated ones are slower than float32."""
    if not on_cpu and torch.cuda.is_available():
        return torch.cuda.is_bf16_supported(including_emulation=False)
    capabilities = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    return bool(capabilities.get("amx_bf16") or capabilities.get("avx512_bf16"))


def keep_freed_memory() -> None:
    """Lets the C library keep the pages of freed tensors, for work on the CPU; does nothing where
    it is not glibc.

    By default it returns large blocks to the system at once and asks for them again at the next
    operation, and the kernel zeroes every page again: more than half of a training step at 4 rows
    of 1,024 tokens and a vocabulary of 8,000.
    """
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, 2**30)
        # never: work that frees more than any limit would meet it every time
        libc.mallopt(_M_TRIM_THRESHOLD, -1)


def cache_bytes(cache) -> int:
    """Bytes of the keys, values and memories that a cache holds after the tokens read so far,
    bounded or dynamic."""
    if hasattr(cache, "nbytes"):
        return cache.nbytes()
    return sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)


def peak_memory() -> dict[str, float]:
    """Peak memory of this process in MiB: resident memory, and the GPU's allocated memory where
    there is one."""
    peak = {"peak_rss_mib": round(peak_memory_bytes() / 2**20, 1)}
    if torch.cuda.is_available():
        peak["peak_cuda_mib"] = round(torch.cuda.max_memory_allocated() / 2**20, 1)
    return peak


def environment() -> dict:
    """Command, date, library versions and hardware, for `result.json`."""
    from hf_infini import __version__

    if torch.cuda.is_available():
        hardware = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    else:
        names, cpu_info = [platform.processor() or platform.machine()], Path("/proc/cpuinfo")
        lines = cpu_info.read_text().splitlines() if cpu_info.is_file() else []
        models = [line.split(":")[1].strip() for line in lines if "model name" in line]
        hardware = f"{os.cpu_count()} CPU cores, {[*models, *names][0]}"
    versions = {"hf_infini": __version__, "torch": torch.__version__}
    versions |= {"transformers": transformers.__version__, "python": platform.python_version()}
    return {
        "command": shlex.join([Path(sys.executable).name, *sys.argv]),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "hardware": hardware,
        "versions": versions,
    }
