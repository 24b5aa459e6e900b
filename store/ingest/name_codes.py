"""Map the names of all ranks to codes of one dictionary, so that records of many ranks are inserted together.

Each rank numbers its names independently (`names.jsonl`), so an operation has different numbers on different ranks. A
`NameBook` converts one rank's numbers to codes of the ingester's `Dictionary`; code 0 is "no name".
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from probes.tape.format.names import read_names
from probes.tape.redaction.secrets import Redactor

__all__ = ["Dictionary", "NameBook"]

_redact = Redactor()


class Dictionary:
    """Texts by code."""

    def __init__(self) -> None:
        self._codes: dict[str, int] = {"": 0}
        self._texts: list[str | None] = [None]

    def code(self, text: str) -> int:
        """Return the code of a text; assign one if the text is new."""
        text = text.encode("utf-8", "replace").decode()
        code = self._codes.setdefault(text, len(self._texts))
        if code == len(self._texts):
            self._texts.append(text)
        return code

    def decoded(self, codes: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Convert a column of codes to texts; None for code 0."""
        texts = np.empty(len(codes), dtype=object)
        texts[:] = [self._texts[code] for code in codes.tolist()]
        return texts

    def texts_of(self, columns: Sequence[npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
        """The entries of the dictionary that these columns use: {"code": codes, "text": texts}."""
        used = np.zeros(len(self._texts), dtype=bool)
        for codes in columns:
            used[codes] = True
        used[0] = False
        codes = np.flatnonzero(used)
        texts = np.empty(len(codes), dtype=object)
        texts[:] = [self._texts[code] for code in codes]
        return {"code": codes.astype(np.int64), "text": texts}


class NameBook:
    """One rank's names. The file is read again when a record refers to an unknown number."""

    def __init__(self, path: Path, dictionary: Dictionary) -> None:
        self._path = path
        self._dictionary = dictionary
        self._table: npt.NDArray[np.int64] = np.zeros(1, dtype=np.int64)  # code by number, -1: unknown
        self._size = -1
        self._missing: set[int] = set()
        self._is_refused = False

    @property
    def problem(self) -> str:
        """Description of what is wrong with the file's content. Empty if it is sound, or if the file was refused
        (`RunDir.problems` reports that).
        """
        if not self._missing or self._is_refused:
            return ""
        return f"lacks names that records refer to ({len(self._missing)}): they are shown as `?<number>`"

    def codes(self, numbers: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        """Convert a column of name numbers to codes. A number that is missing in `names.jsonl` reads `?<number>`."""
        found = self._find(numbers)
        if (found < 0).any():
            self._read()
            found = self._find(numbers)
            for number in np.unique(numbers[found < 0]).tolist():
                found[numbers == number] = self._dictionary.code(f"?{number}")
                self._missing.add(number)
        return found

    def _find(self, numbers: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        top = len(self._table)
        if int(numbers.max(initial=0)) < top:
            return np.take(self._table, numbers)
        return np.where(numbers < top, np.take(self._table, np.minimum(numbers, top - 1)), -1)

    def _read(self) -> None:
        try:
            size = self._path.stat().st_size
            if size == self._size:
                return
            known, _ = read_names(self._path)
        except FileNotFoundError:
            return
        except OSError:
            self._is_refused = True
            return
        self._is_refused = False
        self._size = size
        table = np.full(max(known, default=0) + 1, -1, dtype=np.int64)
        table[0] = 0
        for number, text in known.items():
            table[number] = self._dictionary.code(_redact(text))
        self._table = table
