"""Rankscope's front door: the `rankscope` command (`cli`, `commands/`) and what a training script imports.

Nothing is imported here, so that a script that says `import rankscope` pays nothing for the command line.
"""

from __future__ import annotations

__all__ = ["__version__"]
__version__ = "0.1.0"
