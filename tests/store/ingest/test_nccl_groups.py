"""Which process group an NCCL communicator belongs to, where torch says it, and where it does not."""

from __future__ import annotations

from store.ingest.nccl_groups import Communicator, Group, groups_of_communicators


def communicator(
    number: int, *, comm_hash: int = 0, name: str = "", ranks: int = 4, place: int = 0, rank: int = 0
) -> Communicator:
    return Communicator(0, rank, number, comm_hash, name or None, ranks, place, number, True)


def group(label: str, members: tuple[int, ...], *, name: str = "", rank: int = 0, below: bool = True) -> Group:
    return Group(0, rank, label, label.partition(":")[0], name, members, below)


def labels(communicators: list[Communicator], groups: list[Group]) -> list[str]:
    return [label for _, label, _, _ in groups_of_communicators(communicators, groups)]


WORLD, DP, TP, PP = (0, 1, 2, 3), (0, 1, 2, 3), (0, 1), (0, 2)


def test_size_and_place_choose() -> None:
    groups = [group("world:0-3", WORLD), group("tp:0-1", TP)]
    assert labels([communicator(0, ranks=2), communicator(1, ranks=4)], groups) == ["tp:0-1", "world:0-3"]


def test_groups_of_one_size_are_matched_by_members() -> None:
    groups = [group("tp:0-1", TP), group("pp:0,2", PP), group("pp:0,2", PP, rank=2)]
    known = [communicator(0, comm_hash=7, ranks=2), communicator(0, comm_hash=7, ranks=2, place=1, rank=2)]
    assert labels(known, groups) == ["pp:0,2", "pp:0,2"]


def test_name_decides_where_the_members_do_not() -> None:
    groups = [group("world:0-3", WORLD, name="0"), group("dp_shard:0-3", DP, name="17")]
    known = [communicator(0, name="17"), communicator(1, name="0")]
    assert labels(known, groups) == ["dp_shard:0-3", "world:0-3"]


def test_order_decides_between_equal_groups() -> None:
    groups = [group("world:0-3", WORLD), group("dp_shard:0-3", DP)]
    assert labels([communicator(0), communicator(1)], groups) == ["world:0-3", "dp_shard:0-3"]


def test_without_a_group_the_label_is_the_same_on_all_ranks_and_nodes() -> None:
    both = [communicator(0, comm_hash=-1, ranks=2), communicator(4, comm_hash=-1, ranks=2, place=1, rank=9)]
    assert labels(both, []) == ["nccl:n=2@ffffff"] * 2
    assert labels(both[:1], []) == ["nccl:n=2@ffffff"]
    assert labels([communicator(0, comm_hash=16 << 56, name="mesh:dp")], []) == ["mesh_dp:n=4@100000"]


def test_third_communicator_of_a_size_is_not_forced_into_a_group() -> None:
    groups = [group("tp:0-1", TP)]
    found = labels([communicator(0, ranks=2), communicator(1, ranks=2, comm_hash=3)], groups)
    assert found == ["tp:0-1", "nccl:n=2@000000"]


def test_group_of_the_wrapper_is_not_ours() -> None:
    groups = [group("world:0-3", WORLD, below=False)]
    assert [is_ours for *_, is_ours in groups_of_communicators([communicator(0)], groups)] == [False]


def test_interface_without_sizes_goes_by_order() -> None:
    before_v4 = Communicator(0, 0, 0, None, None, None, None, 0, True)
    assert labels([before_v4], [group("world:0-3", WORLD)]) == ["world:0-3"]
