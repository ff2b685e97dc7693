"""What is asked, as it is read: bodies that are made to be hard to read are given up at once."""

import pytest
from pydantic import ValidationError

from bbalpha.serve.messages import MOST_LINES, MOST_NAMES, AttackAsked, PredictAsked


@pytest.mark.parametrize(
    ("asked", "body", "why"),
    [
        (PredictAsked, {str(i): 1 for i in range(MOST_NAMES + 1)}, f"at most {MOST_NAMES} names, and has 101"),
        (PredictAsked, {"image": [[]] * (MOST_LINES + 1)}, f"at most {MOST_LINES} items"),
        (AttackAsked, {"image": [["x"]] * (MOST_LINES + 1)}, f"at most {MOST_LINES} items"),
    ],
)
def test_what_has_no_end_is_one_error(asked, body, why):
    with pytest.raises(ValidationError, match=why) as caught:
        asked.model_validate(body)
    assert caught.value.error_count() == 1


def test_a_few_odd_names_are_named():
    with pytest.raises(ValidationError, match="rowz") as caught:
        PredictAsked.model_validate({"rowz": 1, "x": 2})
    assert caught.value.error_count() == 2
