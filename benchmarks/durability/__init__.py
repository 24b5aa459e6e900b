"""Kills, power cuts, damages, signals and hours of faults."""

from __future__ import annotations
