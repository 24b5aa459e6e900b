"""The verdict on text logs: the proven cause, its victims, and what to collect if no cause is proven."""

from __future__ import annotations
