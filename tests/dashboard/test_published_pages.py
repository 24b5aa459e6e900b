"""The pages of an address: each draws what was published, and says where the rest is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from store import Store
from store.published.publish import Publisher
from tests.dashboard.opened import PAGES, open_page, shown
from tests.depth import usually
from tests.factories import make_run
from watch.sharing.followed import followed


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Folder with the copy of a run of two ranks that was published to a folder, logs and a stack aside."""
    place = tmp_path_factory.mktemp("published")
    run = make_run(place, ranks=2, steps=20)
    for name, text in (("logs/attempt-0/rank-00001.out.log", "step 5"), ("stacks/attempt-0/rank-00001.txt", "a.py:3")):
        (run.path / name).parent.mkdir(parents=True, exist_ok=True)
        (run.path / name).write_text(text)
    with Store.open(run):
        pass
    publisher = Publisher(f"file://{place}/lake", run, node_rank=0)
    publisher.write(publisher.read(is_last=True))
    with followed(f"file://{place}/lake", report=print) as folder:
        yield folder


@pytest.mark.parametrize(
    "page", usually(PAGES, later=PAGES.keys() - {"overview", "timeline", "logs", "configuration", "fleet"})
)
def test_every_page_is_drawn(runs: Path, page: str) -> None:
    app = open_page(runs, page)
    assert not app.exception, [error.value for error in app.exception]
    assert "could not be computed" not in shown(app)


def test_logs_and_stacks_are_said_to_be_on_the_nodes(runs: Path) -> None:
    assert "Logs are not published" in shown(open_page(runs, "logs"))
    panel = shown(open_page(runs, "ranks", rank="1", step="5"))
    assert "Own work by phase" in panel
    assert "Log lines and stacks are not published" in panel
    assert "No log line" not in panel
