"""Pydantic's messages in the words of this project.

in_words("Input should be greater than or equal to 1")                              # "must be at least 1"
in_words("Input should be a valid integer, unable to parse string as an integer")   # "must be a whole number"
"""

from __future__ import annotations

import re

__all__ = ["in_words"]

_KINDS = {
    "integer": "a whole number",
    "number": "a number",
    "boolean": "true or false",
    "string": "a text",
    "tuple": "a list",
    "list": "a list",
    "dictionary": "a table",
}
_WORDS = (
    (r"a valid boolean or\b", "true, false or"),
    (rf"an? valid ({'|'.join(_KINDS)})\b(, (unable to parse|got a number).*)?", lambda found: _KINDS[found[1]]),
    (r"greater than or equal to", "at least"),
    (r"less than or equal to", "at most"),
    (r"greater than", "above"),
    (r"less than", "below"),
    (r" after validation\b", ""),
    (r"\b(Input|String|List|Tuple|Dictionary) should\b", "must"),
)


def in_words(message: str) -> str:
    """Return the message with a plain requirement; other text in it is unchanged."""
    for pattern, words in _WORDS:
        message = re.sub(pattern, words, message)
    return message
