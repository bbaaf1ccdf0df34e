"""Split strings, for any weights."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from preprocessing.samples.splits import parse_split, split_range


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=3).filter(any), st.integers(0, 5000))
def test_splits_never_overlap_and_leave_nothing_out(weights: list[int], num_units: int):
    ranges = [split_range(bounds, num_units) for bounds in parse_split(",".join(map(str, weights)))]
    assert [unit for part in ranges for unit in part] == list(range(num_units))


@pytest.mark.parametrize(
    "text",
    ["", " ", "a", "1,,1", "1;1", "-1,2", "0,0,0", "0", "1,1,1,1", "nan", "inf,1", "1e2,1", "0x1", "١,1", "1_0", "+1"],
)
def test_what_is_no_split_is_an_error_that_quotes_it(text: str):
    with pytest.raises(ValueError, match="split") as caught:
        parse_split(text)
    assert repr(text) in str(caught.value)
