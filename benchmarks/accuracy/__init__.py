"""Accuracy of verdicts and plans, measured on runs with a known answer."""

from __future__ import annotations
