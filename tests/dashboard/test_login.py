"""With a token nothing of a run is shown before it was typed; without one there is no login."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dashboard import login
from dashboard.launch import DashboardError, DashboardServer
from dashboard.token_file import VARIABLE
from tests.dashboard.opened import open_page, shown

TOKEN = "0123456789abcdef-right"


@pytest.fixture
def token_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "token"
    path.touch(mode=0o600)
    path.write_text(TOKEN + "\n")
    monkeypatch.setenv(VARIABLE, str(path))
    monkeypatch.setattr(login, "WRONG_S", 0.01)
    return path


def test_only_the_token_opens_the_pages(runs: Path, token_file: Path) -> None:
    app = open_page(runs, "sql")
    names = os.listdir(runs)
    for given in ("", "wrong", TOKEN[:-1], TOKEN + "x", "0" * 10_000):
        app.text_input(key="login-token").set_value(given)
        app.button[0].click().run()
        assert not app.exception
        assert not app.dataframe
        assert not app.sidebar.selectbox
        assert not any(name in shown(app) for name in names)
    app.text_input(key="login-token").set_value(TOKEN)
    app.button[0].click().run()
    assert not app.exception
    assert app.sidebar.selectbox
    assert TOKEN not in shown(app)
    assert not open_page(runs, "sql").sidebar.selectbox, "another session has to log in"
    token_file.unlink()
    app = open_page(runs, "sql")
    app.text_input(key="login-token").set_value("")
    app.button[0].click().run()
    assert not app.sidebar.selectbox, "without its file nobody is let in"


@pytest.mark.parametrize(("mode", "text", "why"), [(0o644, TOKEN, "chmod 600"), (0o600, "short", "a token needs 16")])
def test_an_unsafe_token_file_is_refused_at_the_start(tmp_path: Path, mode: int, text: str, why: str) -> None:
    path = tmp_path / "token"
    path.write_text(text)
    path.chmod(mode)
    with pytest.raises(DashboardError, match=why):
        DashboardServer(tmp_path, port=0, token_file=path)
    with pytest.raises(DashboardError, match="cannot be read"):
        DashboardServer(tmp_path, port=0, token_file=tmp_path / "none")
