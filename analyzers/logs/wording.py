"""Next steps for log lines that need another one than the default of their cause."""

from __future__ import annotations

import re
from collections.abc import Mapping

__all__ = ["ANALYZER", "DO_OF_LINE", "NCCL_PARTS", "do_of_device"]

ANALYZER = "logs"

DO_OF_LINE: Mapping[str, str] = {
    "driver_library_differ": "The driver's kernel module and libraries have different versions, as after an update: "
    "reboot that host, or unload and load the nvidia modules.",
    "driver_unreachable": "The driver is not loaded or not visible there: check `lsmod | grep nvidia`, `dmesg -T | "
    "grep NVRM`, and in a container its runtime (`--gpus`, nvidia-container-toolkit).",
    "fabric_manager": "The GPUs behind NVSwitches wait for the fabric manager: check `systemctl status "
    "nvidia-fabricmanager` on that host, and that its version is the driver's (`nvidia-smi -q | grep -A2 Fabric` "
    "prints Completed once it is ready).",
    "device_unreachable": "The GPU does not answer its driver: look for an XID or PCIe errors (`dmesg -T`), reset the "
    "GPU or reboot the host, and drain it if that happens again.",
    "device_uncorrectable": "Drain the node and read the error counters of that GPU (AMD: `amd-smi metric --ecc`; "
    "NVIDIA: `nvidia-smi -q -d ECC,ROW_REMAPPER`). Reset it, and replace it if the error comes back.",
    "device_not_started": "The driver could not start that device: read `dmesg -T | grep habanalabs` and `hl-smi`, "
    "power-cycle the host, and drain it if the device does not come back.",
    "disk_quota": "The user's or project's quota is used up, even if the disk has free space: delete files or ask "
    "for more (`quota -s`, `lfs quota -h`).",
    "file_size_limit": "The file exceeds the largest size that is allowed there, however much space is free: raise "
    "`ulimit -f` where the processes start, or write smaller files (shards). FAT allows 4 GiB.",
    "npu_core": "Find the `errorStr` of that device in its plog. An address out of range is an index or shape of the "
    "program: run again with ASCEND_LAUNCH_BLOCKING=1 to get the operator's line.",
    "extension_mismatch": "An extension was built for another version of torch: reinstall it for the installed one "
    "(pip install --force-reinstall --no-cache-dir --no-build-isolation NAME).",
    "library_mismatch": "A library of another version is found first: compare `pip list | grep -i nvidia` and "
    "`echo $LD_LIBRARY_PATH`, and keep one version of each (NCCL, cuDNN, cuBLAS).",
    "bitsandbytes_setup": "Run `python -m bitsandbytes` on that node, and install a version with a build for torch's "
    "CUDA (`torch.version.cuda`); libcudart must be in LD_LIBRARY_PATH.",
    "driver_too_old": "The driver of that host is older than this build's CUDA needs: update the driver (`nvidia-smi` "
    "prints its version), or install a build for an older CUDA (`torch.version.cuda`).",
    "architecture_missing": "This build of torch or of an extension has no code for that GPU: install one for its "
    "architecture (`torch.cuda.get_arch_list()`).",
    "library_handle": "The library could not initialise. Usually the device's memory is full (`nvidia-smi`, a "
    "smaller batch); otherwise an earlier index is out of range: run again with CUDA_LAUNCH_BLOCKING=1.",
    "kernel_fault": "Usually a kernel accessed memory out of bounds: run again with CUDA_LAUNCH_BLOCKING=1 to get its "
    "line, or under compute-sanitizer. Suspect the device only if `dmesg -T | grep -i xid` on that host shows XIDs "
    "other than 13, 31, 43 or 45.",
    "download_denied": "The account has no permission to read that address: log in (`hf auth login`, HF_TOKEN) and "
    "ask for access, or download beforehand and set HF_HUB_OFFLINE=1.",
    "remote_store": "The store refused the request or did not answer: check whether the credentials expired, the "
    "rate limits, and the route from that node. Save to a local disk first and upload from there (run a tracker "
    "offline).",
    "fabric_provider": "The library found no working transport: list those of libfabric or UCX (`fi_info`, "
    "`ucx_info -d`), and set FI_PROVIDER and FI_PROVIDER_PATH, or UCX_TLS, to one that all nodes have.",
    "fabric_setup": "The network plugin cannot open its device: check what libfabric lists in that container and job "
    "(`fi_info`), whether its version fits the plugin's, and whether the job has access to the device (Slingshot: a "
    "service and VNI; EFA: the security group and /dev/infiniband). NCCL_NET=Socket avoids it.",
    "nccl_setup_differs": "Two ranks set up a communicator in different ways: compare NCCL's version and NCCL_* on all "
    "nodes (NCCL_DEBUG=INFO prints both). If they are equal, try another version of NCCL.",
    "worker_unregistered": "Read why the workers of that node ended (`ls -t /tmp/ray/session_latest/logs/worker-*`), "
    "and check that Ray's and Python's versions there are the driver's.",
    "store_unreachable": "No route leads from that host to the address: check what MASTER_ADDR resolves to there "
    "(`getent hosts NAME`), use a name on a network that all nodes share (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME), and "
    "open the port.",
    "device_held": "Usually a process of the previous job still holds the device: end it, wait ten seconds and start "
    "again (`npu-smi info`, `fuser -v /dev/davinci*`).",
    "shared_object_gone": "The object was removed from /dev/shm while it was in use: its process ended (see how), or "
    "a clean-up ran. systemd does that when the user's last login ends (`loginctl enable-linger USER`).",
    "device_hidden": "The process asks for a device that it cannot see: compare CUDA_VISIBLE_DEVICES, the scheduler's "
    "GPUs and the processes per node with `nvidia-smi -L` there.",
}
"""Next step by kind of line, for causes that need different next steps for different lines."""

_P2P = (
    "direct access between GPUs (P2P)",
    "See `nvidia-smi topo -p2p r` (AMD: `amd-smi topology`), and on PCIe whether ACS or the IOMMU is on. "
    "NCCL_P2P_DISABLE=1 avoids it.",
)
NCCL_PARTS: Mapping[str, tuple[str, str]] = {
    "transport/nvls.cc": (
        "NVLink SHARP (NVLS)",
        "NVLS needs a working fabric manager: check `systemctl status nvidia-fabricmanager` and `nvidia-smi -q | grep "
        "-A2 Fabric`, and reboot the host if the manager was restarted under load. NCCL_NVLS_ENABLE=0 avoids it.",
    ),
    "transport/p2p.cc": _P2P,
    "peer access is not supported": _P2P,
    "peer mapping resources exhausted": _P2P,
    "mnnvl.cc": (
        "NVLink between hosts (MNNVL)",
        "Check that IMEX runs on all of these hosts (`nvidia-imex-ctl -N`). NCCL_MNNVL_ENABLE=0 avoids it.",
    ),
    "transport/coll_net.cc": (
        "reductions in the switches (SHARP)",
        "Check the fabric's aggregation manager. NCCL_COLLNET_ENABLE=0 avoids it.",
    ),
    "operation not supported": (
        "a feature of CUDA that the driver or the virtual GPU lacks",
        "Update the driver to one for this build's CUDA. On a virtual GPU, turn on unified memory (vGPU: enable_uvm).",
    ),
}
"""What NCCL could not set up: {source file or CUDA error in the log line: (its name, next step)}. Files come first."""

_AMD = re.compile(
    r"\bHSA_STATUS|\bhipError|\bHIP (?:error|failure)|reason ?: ?GPU Hang|Memory access fault by GPU node|"
    r"page fault \(src_id:"
)
_INTEL = re.compile(r"\b(?:UR|ZE)_RESULT_ERROR|\blevel_zero\b|Segmentation fault from GPU at 0x")
_FAULT_DO_OF_MAKER = (
    (
        _AMD,
        "Usually a kernel accessed memory out of bounds: run again with AMD_SERIALIZE_KERNEL=3 to get its line. "
        "Suspect the device only if `dmesg -T | grep amdgpu` on that host shows more than that fault (RAS).",
    ),
    (
        _INTEL,
        "Usually a kernel accessed memory out of bounds: run again with ZE_SERIALIZE=2 to get its line. Suspect the "
        "device only if other programs fail on it, too.",
    ),
)
_DO_OF_MAKER = (
    (
        _AMD,
        "Drain the node, read `dmesg -T | grep amdgpu` and `amd-smi metric --ecc` on it, and reset or replace the GPU.",
    ),
    (
        _INTEL,
        "Read `dmesg -T | grep -E ' (xe|i915) '` and `xpu-smi health -l` on that host. The driver also resets a GPU "
        "whose kernel does not end; replace the GPU only if other programs fail on it, too.",
    ),
    (
        re.compile(r"\bHBM MULTI BIT|\b(?:UCE|MEM) ERROR\b|\bNPU\b"),
        "Drain the node, read `npu-smi info -t ecc -i ID` and the plog on it, and reset or replace the NPU.",
    ),
)


def do_of_device(text: str, kind: str) -> str | None:
    """Next step for an error of a device, or for a fault of its kernel, by its maker. None if the cause's applies."""
    if kind != "kernel_fault" and kind in DO_OF_LINE:
        return DO_OF_LINE[kind]
    makers = _FAULT_DO_OF_MAKER if kind == "kernel_fault" else _DO_OF_MAKER
    return next((do for pattern, do in makers if pattern.search(text)), DO_OF_LINE.get(kind))
