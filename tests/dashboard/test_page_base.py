"""The document of the pages names the root of the server, and nothing else is changed."""

from __future__ import annotations

import pytest
from starlette.responses import PlainTextResponse, Response
from starlette.testclient import TestClient
from streamlit.web.server.starlette import starlette_app

from dashboard.page_base import RootUrlMiddleware, set_server_root

DOCUMENT = "<html><head><title>Streamlit</title></head></html>"


@pytest.mark.parametrize("page", ["/", "/ranks", "/overview?run=a"])
def test_a_document_names_its_root(page: str) -> None:
    answer = TestClient(RootUrlMiddleware(Response(DOCUMENT, media_type="text/html"))).get(page)
    assert 'BACKEND_BASE_URL: new URL(".", location.href).href' in answer.text
    assert answer.text.index("<script>") < answer.text.index("<title>")
    assert int(answer.headers["content-length"]) == len(answer.content)


@pytest.mark.parametrize(
    "answer", [PlainTextResponse(DOCUMENT), Response(DOCUMENT, status_code=404, media_type="text/html")]
)
def test_other_answers_stay(answer: Response) -> None:
    assert TestClient(RootUrlMiddleware(answer)).get("/ranks/_stcore/health").text == DOCUMENT


def test_it_is_put_before_compression(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(starlette_app, "create_streamlit_middleware", starlette_app.create_streamlit_middleware)
    before = len(starlette_app.create_streamlit_middleware())
    set_server_root()
    found = starlette_app.create_streamlit_middleware()
    assert found[-1].cls is RootUrlMiddleware
    assert len(found) == before + 1
