"""The verdict of text logs: who is proven to be the cause, who only suffered, and what to collect where none is."""

from __future__ import annotations
