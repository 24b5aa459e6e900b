"""Runs published at an address: `watch` writes them while they train, readers copy them from there."""

from __future__ import annotations
