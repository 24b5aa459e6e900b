"""Unpickle numbers, strings and containers only: no class is looked up, no function is called.

    loads(blob)        # {"entries": [...], "version": "2.10"}; PickleError on anything else

A pickle is a program. This interpreter knows only the operations that build plain values (an allow list). Python's
unpickler is unsafe even if `find_class` refuses everything: five bytes (a `LONG_BINPUT` with a huge index) make Python
3.11's unpickler allocate and fill gigabytes.

Limits on operations and objects bound the memory. Keys of dicts must be strings, because a file could choose integers
with colliding hashes, which make a dict quadratic.
"""

from __future__ import annotations

import struct
from typing import Any

from store.readers.untrusted.external_files import SourceError

__all__ = ["PickleError", "loads"]

MAX_OPERATIONS = 20_000_000
MAX_OBJECTS = 3_000_000
"""Maximum number of containers, strings and big numbers. A flight recorder of 20,000 entries with stacks has about
600,000.
"""
_CONSTANTS = {0x4E: None, 0x88: True, 0x89: False}
_EMPTY_TUPLE, _EMPTY_LIST, _EMPTY_DICT = ord(")"), ord("]"), ord("}")


class PickleError(SourceError):
    """The bytes are not a pickle of plain values, are truncated, or exceed a limit."""


def loads(blob: bytes) -> Any:
    """Return the value of a pickle of protocol 2 to 5. Raises PickleError."""
    try:
        return _run(blob)
    except (IndexError, struct.error):
        raise PickleError("is cut off or damaged: the pickle ends early") from None
    except (UnicodeDecodeError, TypeError, AttributeError, KeyError, ValueError) as error:
        if isinstance(error, PickleError):
            raise
        raise PickleError(f"is damaged: the pickle is not valid ({type(error).__name__})") from None


def _run(blob: bytes) -> Any:
    """Interpret the operations. One loop, because a function call per operation would double the time."""
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}
    at, objects, end = 0, 0, len(blob)
    for _ in range(MAX_OPERATIONS):
        op = blob[at]
        at += 1
        if op == 0x68:  # BINGET
            stack.append(memo[blob[at]])
            at += 1
        elif op == 0x4B:  # BININT1
            stack.append(blob[at])
            at += 1
        elif op == 0x6A:  # LONG_BINGET
            stack.append(memo[int.from_bytes(blob[at : at + 4], "little")])
            at += 4
        elif op in (0x58, 0x8C):  # BINUNICODE, SHORT_BINUNICODE
            width = 4 if op == 0x58 else 1
            size = int.from_bytes(blob[at : at + width], "little")
            at += width
            if at + size > end:
                raise PickleError("is cut off: a string is longer than the file")
            stack.append(blob[at : at + size].decode("utf-8", "replace"))
            at += size
            objects += 1 + size // 256
        elif op in (0x71, 0x72, 0x94):  # BINPUT, LONG_BINPUT, MEMOIZE
            width = {0x71: 1, 0x72: 4, 0x94: 0}[op]
            memo[int.from_bytes(blob[at : at + width], "little") if width else len(memo)] = stack[-1]
            at += width
            objects += 1
        elif op in _CONSTANTS:
            stack.append(_CONSTANTS[op])
        elif op == 0x28:  # MARK
            marks.append(len(stack))
            objects += 1
        elif op == _EMPTY_LIST:
            stack.append([])
            objects += 1
        elif op == _EMPTY_DICT:
            stack.append({})
            objects += 1
        elif op == 0x65:  # APPENDS
            items = _since(stack, marks)
            _container(stack, list).extend(items)
        elif op == 0x75:  # SETITEMS
            items = _since(stack, marks)
            _put(_container(stack, dict), items)
        elif op == 0x61:  # APPEND
            item = stack.pop()
            _container(stack, list).append(item)
        elif op == 0x73:  # SETITEM
            pair = [stack[-2], stack[-1]]
            del stack[-2:]
            _put(_container(stack, dict), pair)
        elif op in (0x4A, 0x4D):  # BININT, BININT2
            width = 4 if op == 0x4A else 2
            stack.append(struct.unpack_from("<i" if op == 0x4A else "<H", blob, at)[0])
            at += width
        elif op == 0x8A:  # LONG1: at most 255 bytes, so never a number that is slow to print
            size = blob[at]
            if at + 1 + size > end:
                raise PickleError("is cut off: a number is longer than the file")
            stack.append(int.from_bytes(blob[at + 1 : at + 1 + size], "little", signed=True))
            at += 1 + size
            objects += 1
        elif op == 0x47:  # BINFLOAT
            stack.append(struct.unpack_from(">d", blob, at)[0])
            at += 8
            objects += 1
        elif op in (0x85, 0x86, 0x87):  # TUPLE1, TUPLE2, TUPLE3
            size = op - 0x84
            if len(stack) < size:
                raise IndexError
            stack[-size:] = [tuple(stack[-size:])]
            objects += 1
        elif op == 0x74:  # TUPLE
            stack.append(tuple(_since(stack, marks)))
            objects += 1
        elif op == _EMPTY_TUPLE:
            stack.append(())
        elif op == 0x80:  # PROTO
            if not 2 <= blob[at] <= 5:
                raise PickleError(f"is a pickle of protocol {blob[at]}: only 2 to 5 are supported")
            at += 1
        elif op == 0x95:  # FRAME: only a hint for readers of streams
            at += 8
        elif op == 0x2E:  # STOP
            if len(stack) != 1 or marks:
                raise PickleError("is damaged: the pickle is not valid")
            return stack[0]
        else:
            raise PickleError(_forbidden(op))
        if objects > MAX_OBJECTS:
            raise PickleError(f"holds more than {MAX_OBJECTS:,} objects: no dump has so many")
    raise PickleError(f"holds more than {MAX_OPERATIONS:,} operations: no dump has so many")


def _since(stack: list[Any], marks: list[int]) -> list[Any]:
    mark = marks.pop()
    items = stack[mark:]
    del stack[mark:]
    return items


def _container(stack: list[Any], kind: type) -> Any:
    if type(stack[-1]) is not kind:
        raise TypeError
    return stack[-1]


def _put(target: dict[str, Any], items: list[Any]) -> None:
    if len(items) % 2:
        raise PickleError("is damaged: a key without a value")
    for i in range(0, len(items), 2):
        if type(items[i]) is not str:
            raise PickleError("has a key that is not text: no dump has one")
        target[items[i]] = items[i + 1]


def _forbidden(op: int) -> str:
    if op in b"cibRo\x81\x82\x83\x84\x92\x93PQ":  # operations that look up, build or call something
        return "asks for a Python object: only numbers, strings and containers are read (nothing was executed)"
    return f"holds the pickle operation 0x{op:02x}: only numbers, strings and containers are read"
