"""Recognise communication kernels and the device type in profiler traces.

is_communication("void deep_ep::internode::dispatch<false, 3>(...)")     # True
device_of({"xpu_runtime"}, "Intel(R) Data Center GPU Max 1550")           # "xpu"
"""

from __future__ import annotations

import re
from collections.abc import Collection

__all__ = ["COMMUNICATION_KERNEL", "device_of", "is_communication"]

COMMUNICATION_KERNEL = re.compile(
    r"nccl|rccl|oneccl|hccl|hcom_|mscclpp|uccl"  # collective libraries
    r"|deep_?ep|hybrid_?ep|nvshmem|rocshmem|pplx|(?:inter|intra)node(?:_ll)?::|\bnotify_dispatch|\bcached_notify"
    r"|userbuffers|cross_device_reduce|quick_?reduce|multimem_|symm(?:etric)?_mem"
    r"|(?:one|two)_?shot_?all_?reduce|all_?reduce_?fusion|lamport_all_?reduce",
    re.IGNORECASE,
)
"""Collectives; expert parallelism (DeepEP, NVSHMEM, PPLX); Transformer Engine's user buffers; custom all-reduces of
vLLM, TensorRT-LLM, FlashInfer and AMD; torch's symmetric memory."""
_GENERATED = re.compile(r"\s*triton_(?:poi|red|per|tem|mm|for|split)_", re.IGNORECASE)
"""Inductor's kernels are named after nearby operators, including communication, which they do not perform."""
_BY_CATEGORY = {
    "mtia_ccp_events": "mtia", "mtia_runtime": "mtia", "mtia_insight": "mtia", "hpu_op": "hpu", "xpu_runtime": "xpu",
    "xpu_driver": "xpu", "hip_runtime": "rocm", "hip_driver": "rocm", "async_npu": "npu",
    "overlap analysis": "npu", "privateuse1_kernel": "privateuse1", "privateuse1_runtime": "privateuse1",
}  # fmt: skip
_BY_MODEL = (
    (re.compile(r"\bAMD\b|Instinct|Radeon|\bMI\d{3}", re.IGNORECASE), "rocm"),
    (re.compile(r"Intel|\bXPU\b", re.IGNORECASE), "xpu"),
    (re.compile(r"MTIA", re.IGNORECASE), "mtia"),
    (re.compile(r"Ascend", re.IGNORECASE), "npu"),
    (re.compile(r"Gaudi|\bHPU\b", re.IGNORECASE), "hpu"),
)


def is_communication(kernel: str) -> bool:
    """Return True if a kernel with this name moves data between devices."""
    name = kernel[:300]
    return COMMUNICATION_KERNEL.search(name) is not None and _GENERATED.match(name) is None


def device_of(categories: Collection[str], model: str) -> str:
    """Device type of a trace, from its events' categories, or else from the device's model name, or else cuda."""
    for category in categories:
        if category in _BY_CATEGORY:
            return _BY_CATEGORY[category]
    return next((kind for pattern, kind in _BY_MODEL if pattern.search(model)), "cuda")
