"""Runs at an address: published by `watch` while they live, copied from there by readers."""

from __future__ import annotations
