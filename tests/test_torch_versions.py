"""The script that runs versions of torch: what an environment needs, and its table."""

from __future__ import annotations

from benchmarks.accuracy.torch_versions import Outcome, libraries, markdown

METADATA = """Metadata-Version: 2.4
Name: torch
Requires-Dist: filelock
Requires-Dist: cuda-toolkit[cublas,cudart,curand,cusolver,cusparse,nvrtc,nvtx]==13.0.2; platform_system == "Linux"
Requires-Dist: cuda-bindings<14,>=13.0.3; platform_system == "Linux"
Requires-Dist: nvidia-nccl-cu13==2.28.9; platform_system == "Linux"
Requires-Dist: nvidia-cusolver-cu12==11.7.3.90; platform_system == "Linux"
Requires-Dist: triton==3.6.0; platform_system == "Linux"
Requires-Dist: nvidia-extra==1; extra == "more"
"""


def test_only_libraries_that_an_import_loads_are_fetched() -> None:
    assert libraries(METADATA) == [
        "cuda-toolkit[cublas,cudart,curand,cusparse,nvrtc]==13.0.2", "nvidia-nccl-cu13==2.28.9"
    ]  # fmt: skip
    assert libraries("Name: torch\nRequires-Dist: filelock\n") == []


def test_a_row_a_version_with_what_failed() -> None:
    outcomes = [
        Outcome(version="2.11.0", trial="ddp", passed=True, seconds=41.6, what=""),
        Outcome(version="2.15.0", trial="hang", passed=False, seconds=7.0, what="exit code 1: no"),
    ]
    assert markdown(outcomes).splitlines() == [
        "| torch | ddp | hang |", "|---|---|---|", "| 2.11.0 | 42 s | - |", "| 2.15.0 | - | exit code 1: no |",
    ]  # fmt: skip
