"""What a run is measured on and with: peak memory, library versions, hardware, whether bfloat16 is native."""

import datetime
import os
import platform
import sys
from pathlib import Path

import torch
import transformers


def supports_bfloat16(on_cpu: bool) -> bool:
    """Whether bfloat16 matrix products are native here; emulated ones are slower than float32."""
    if not on_cpu and torch.cuda.is_available():
        return torch.cuda.is_bf16_supported(including_emulation=False)
    capabilities = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    return bool(capabilities.get("amx_bf16") or capabilities.get("avx512_bf16"))


def peak_memory() -> dict[str, float]:
    """Peak memory of this process in MiB: resident memory, and the GPU's allocated memory where there is one."""
    import resource

    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss: bytes on macOS, KiB on Linux
    peak = {"peak_rss_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20, 1)}
    if torch.cuda.is_available():
        peak["peak_cuda_mib"] = round(torch.cuda.max_memory_allocated() / 2**20, 1)
    return peak


def environment() -> dict:
    """Date, library versions and hardware, for `result.json`."""
    from . import __version__

    if torch.cuda.is_available():
        hardware = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    else:
        name = platform.processor() or platform.machine()
        cpu_info = Path("/proc/cpuinfo")
        if cpu_info.is_file():
            models = [line.split(":")[1].strip() for line in cpu_info.read_text().splitlines() if "model name" in line]
            name = models[0] if models else name
        hardware = f"{os.cpu_count()} CPU cores, {name}"
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "hardware": hardware,
        "versions": {
            "hf_infini": __version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
    }
