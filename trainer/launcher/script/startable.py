"""Find out why Python cannot start a script or module, without running it.

script_problem(Path("train.py"))      # "line 12: invalid syntax", or "" if it compiles
module_problem("my.package.train")    # "no module my.package", or "" if it is there
"""

from __future__ import annotations

import os
import sys
import warnings
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path

__all__ = ["module_problem", "script_problem"]


def script_problem(script: Path) -> str:
    """Syntax error of a script. Bytecode and zip files, which Python can also run, have none."""
    try:
        source = script.read_bytes()
        if b"\0" in source:
            return ""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python shows the warnings when it runs the script
            compile(source, script, "exec", dont_inherit=True)
    except SyntaxError as error:
        return f"not a Python script: {error.msg} in line {error.lineno}"
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    return ""


def module_problem(name: str) -> str:
    """Problem of a dotted module name: which part of it does not exist on the Python path, or that the package has no
    `__main__.py`; empty if there is no problem. Packages are not imported."""
    first, *others = name.split(".")
    path = [os.getcwd(), *sys.path]
    try:
        spec = PathFinder.find_spec(first, path) or find_spec(first)
    except (ImportError, ValueError):
        spec = None
    found = first
    for part in others:
        if spec is None or spec.submodule_search_locations is None:
            break
        found = f"{found}.{part}"
        spec = PathFinder.find_spec(found, [*spec.submodule_search_locations])
    if spec is None or found != name:
        return f"no module {found if spec is None else name}"
    folders = spec.submodule_search_locations
    if folders is not None and PathFinder.find_spec(f"{name}.__main__", [*folders]) is None:
        return "a package without __main__.py"
    return ""
