"""The commands, one a file: arguments, help with examples, and what it calls. Heavy imports are inside the functions.

app.command(epilog=train.EPILOG)(train.train)       # in `rankscope.cli`
"""

from __future__ import annotations
