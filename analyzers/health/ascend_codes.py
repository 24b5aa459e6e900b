"""Meaning of the error codes that CANN, HCCL and torch_npu print.

codes_in("NPU function error: AclrtSynchronizeStreamWithTimeout, error code is 507035")    # ["507035"]
meaning("507035")                                                                          # "vector core exception"
explained_code("EI0006")                                       # "EI0006: no socket to another rank within the timeout"
"""

from __future__ import annotations

import re
from collections.abc import Mapping

__all__ = ["CODES_OF_WAITS", "codes_in", "explained_code", "meaning"]

_MEANINGS: Mapping[str, str] = {
    # acl/error_codes/rt_error_codes.h
    "107002": "the context is null",
    "107020": "waiting for a device task timed out",
    "207001": "the device is out of memory",
    "207003": "no resource left on the device",
    "207018": "the device is out of huge pages",
    "507000": "internal error of the runtime",
    "507001": "internal error of the task scheduler",
    "507010": "the device's heartbeat was lost",
    "507011": "the execution of a model or stream failed",
    "507012": "a report from the device timed out",
    "507013": "system DMA error",
    "507014": "AI core timeout",
    "507015": "AI core exception",
    "507016": "AI core trap exception",
    "507017": "AI CPU timeout",
    "507018": "AI CPU exception",
    "507033": "the device could not be initialised",
    "507034": "vector core timeout",
    "507035": "vector core exception",
    "507036": "vector core trap exception",
    "507046": "a stream's tasks did not finish in time",
    "507047": "an event was not recorded in time",
    "507048": "a device task did not finish in time",
    "507899": "internal error of the driver",
    "507900": "internal error of the AI CPU",
    "507901": "the connection to the device was closed",
    # HCCL
    "EI0001": "an HCCL environment variable is invalid",
    "EI0002": "no notification from another rank within the timeout",
    "EI0003": "a collective call has an invalid argument",
    "EI0004": "the rank table is invalid",
    "EI0005": "the ranks passed different arguments to one collective call",
    "EI0006": "no socket to another rank within the timeout",
    "EI0007": "HCCL could not allocate a resource, such as memory or a stream",
    "EI0008": "HCCL's versions differ between ranks",
    "EI0009": "HCCL could not set up a link between two ranks",
    "EI0010": "direct access between two NPUs failed",
    "EI0011": "the device is out of memory",
    "EI0012": "a copy between devices failed",
    "EI0013": "a transfer over RoCE failed",
    "EI0014": "a value in the rank table is invalid",
    "EI0015": "not all ranks reached the first one of the communicator",
    "EI0016": "a setting is invalid, or differs between ranks",
    "EI0017": "an entry of the rank table is missing",
    "EI0018": "a transfer over UB failed",
    "EI0019": "HCCL could not listen on a port of the host",
    "EI0020": "HCCL could not listen on a port of the NPU",
    "EJ0001": "HCCP could not start, most often because the last process still runs",
    "EJ0002": "a network port is down",
    "EJ0003": "HCCP could not listen on its port",
    "EJ0004": "an IP address of the rank table is not the NPU's",
}
CODES_OF_WAITS = ("EI0002", "EI0006", "EI0009")
"""Another rank did not answer in time; it may never have been connected."""
_CODE = re.compile(
    r"(?:error code(?: is)?:?|runtime (?:result|error code)\s*[=:]|retCode[=:]|\bret[=:]) *(?P<number>\d{6})\b|"
    r"\b(?P<name>E[IJ]00\d\d)\b"
)


def codes_in(text: str) -> list[str]:
    """Return the known codes in a text, each once."""
    found = (match["number"] or match["name"] for match in _CODE.finditer(text))
    return [code for code in dict.fromkeys(found) if code in _MEANINGS]


def meaning(code: str) -> str:
    """Return the meaning of a code; empty if the code is unknown."""
    return _MEANINGS.get(code, "")


def explained_code(code: str) -> str:
    """A code with its meaning."""
    return f"{code}: {meaning(code)}" if meaning(code) else code
