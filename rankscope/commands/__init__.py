"""The commands, one per file: arguments, help with examples, and the call. Heavy imports are inside the functions.

app.command(epilog=train.EPILOG)(train.train)       # in `rankscope.cli`
"""

from __future__ import annotations

from rankscope.import_names import claim_names

claim_names()  # a `trainer` in the working directory must not be imported
