"""Numbers of a finding stay short, however large they are."""

from __future__ import annotations

import pytest

from analyzers.wording import counted, group_text, loss_text, natural, rise_text, size_text


@pytest.mark.parametrize(
    ("loss", "text"), [(2.34567, "2.346"), (0.0, "0.000"), (-31622.7766, "-31622.777"), (3.2e10, "3.2e+10"),
                       (1.234567e305, "1.23e+305"), (-5e8, "-5e+08")]
)  # fmt: skip
def test_a_loss_before_it_overflows_is_a_power_of_ten(loss: float, text: str) -> None:
    assert loss_text(loss) == text


@pytest.mark.parametrize(("ratio", "text"), [(0.52, "+52 %"), (193.0, "194x"), (9.87e200, "9.9e+200x")])
def test_a_rise_of_any_size(ratio: float, text: str) -> None:
    assert rise_text(ratio) == text


def test_counted_nouns() -> None:
    assert [counted(number, "microbatch") for number in (1, 4)] == ["1 microbatch", "4 microbatches"]
    assert counted(2, "rank") == "2 ranks"


@pytest.mark.parametrize(
    ("distance", "text"), [(2, "2nd"), (8, "8th"), (11, "11th"), (21, "21st"), (32, "32nd"), (112, "112th")]
)
def test_the_distance_of_a_groups_ranks_is_an_ordinal(distance: int, text: str) -> None:
    assert group_text(f"dp:0-4095/{distance}") == f"dp:0-4095, every {text} rank"


def test_numbers_in_names_sort_as_numbers() -> None:
    assert sorted(["node-10", "node-9", "node-1"], key=natural) == ["node-1", "node-9", "node-10"]


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(512, "512 B"), (3 << 20, "3 MiB"), (1010 << 20, "1,010 MiB"), (8_000_000_000, "7.45 GiB"), (2 << 40, "2 TiB")],
)
def test_sizes_have_the_largest_unit_that_fits_and_no_exponent(num_bytes: int, text: str) -> None:
    assert size_text(num_bytes) == text
