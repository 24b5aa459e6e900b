"""Blocks of lines that belong together: exceptions, and what launchers and tools report."""

from __future__ import annotations
