"""Process groups of a large run: in their natural order, with the number of those left out."""

from __future__ import annotations

from dashboard.data.sql.system_queries import MAX_GROUPS, groups
from tests.analyzers.memory_store import MemoryStore


def test_groups_beyond_the_table_are_counted() -> None:
    num_groups = MAX_GROUPS + 50
    store = MemoryStore()
    members = [[rank, rank + 1] for rank in range(0, 2 * num_groups, 2)]
    rows = [{"process_group": f"tp:{a}-{b}", "members": [a, b], "rank": a, "attempt": 0} for a, b in members]
    store.add("process_groups", rows)
    listed, num_others = groups(store)
    assert ([row["group"] for row in listed[:3]], len(listed)) == (["tp:0-1", "tp:2-3", "tp:4-5"], MAX_GROUPS)
    assert num_others == 50
