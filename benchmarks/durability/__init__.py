"""Durability under kills, power cuts, damaged files, signals and hours of faults."""

from __future__ import annotations
