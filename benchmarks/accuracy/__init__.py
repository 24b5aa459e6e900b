"""Verdicts and plans against runs whose truth is known."""

from __future__ import annotations
