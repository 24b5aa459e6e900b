"""The dashboard answers under its own name and to its own pages only."""

from __future__ import annotations

import pytest

from dashboard.request_site import is_own_request

ALLOWED = ("127.0.0.1", "localhost", "::1")


@pytest.mark.parametrize(
    ("host", "origin"),
    [
        ("127.0.0.1:8501", None),  # a program, or a browser that opens the page
        ("127.0.0.1:8501", "http://127.0.0.1:8501"),
        ("localhost:9000", "http://localhost:9000"),  # through ssh -L 9000:127.0.0.1:8501
        ("LOCALHOST:9000", "http://localhost:9000"),
        ("[::1]:8501", "http://[::1]:8501"),
        ("localhost", "http://localhost"),
        ("localhost:80", "http://localhost"),  # a browser leaves the usual port out
        ("localhost", "https://localhost:443"),
    ],
)
def test_own_pages(host: str, origin: str | None) -> None:
    assert is_own_request(host, origin, ALLOWED)


@pytest.mark.parametrize(
    ("host", "origin"),
    [
        (None, None),
        ("", None),
        ("evil.example:8501", None),
        ("127.0.0.1.evil.example", None),
        ("localhost@evil.example", None),
        ("evil.example@localhost", None),
        ("localhost/evil.example", None),
        ("localhost:port", None),
        ("localhost:99999", None),
        ("[::1", None),
        ("127.0.0.1:8501", "http://127.0.0.1:8000"),  # another program of this machine
        ("127.0.0.1:8501", "http://localhost:8501"),
        ("127.0.0.1:8501", "http://127.0.0.1"),
        ("127.0.0.1:8501", "null"),
        ("127.0.0.1:8501", ""),
        ("127.0.0.1:8501", "file://127.0.0.1:8501"),
        ("127.0.0.1:8501", "http://evil.example"),
    ],
)
def test_requests_of_other_sites(host: str | None, origin: str | None) -> None:
    assert not is_own_request(host, origin, ALLOWED)
