"""The strategies themselves are tested in test_sampling.py and test_zoo.py; here, what they put together."""

import pytest
import torch

from bbalpha._engine.running import merge


def test_outputs_of_any_structure_are_merged_leaf_by_leaf():
    outputs = [{"a": torch.full((2,), float(k)), "b": (torch.tensor([k]), "text")} for k in range(3)]
    merged = merge(outputs, torch.stack)
    assert torch.equal(merged["a"], torch.tensor([[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]]))
    assert torch.equal(merged["b"][0], torch.tensor([[0], [1], [2]]))
    assert merged["b"][1] == "text"


def test_passes_of_other_structure_are_an_error():
    with pytest.raises(ValueError, match="same structure in every pass"):
        merge([torch.zeros(1), (torch.zeros(1), torch.zeros(1))], torch.stack)
