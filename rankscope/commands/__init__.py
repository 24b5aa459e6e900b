"""The commands, one a file: arguments, help with examples, and what it calls. Heavy imports are inside the functions.

app.command(epilog=train.EPILOG)(train.train)       # in `rankscope.cli`
"""

from __future__ import annotations

from rankscope.own_names import claim_names

claim_names()  # a process of ours: a `trainer` that lies where it was started is not meant
