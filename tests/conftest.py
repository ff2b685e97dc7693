import os

import pytest
import torch

os.environ.setdefault("KERAS_BACKEND", "torch")  # Keras asks for TensorFlow where nothing is said
torch.set_num_threads(1)  # two threads on two busy cores are slower than one for small nets


@pytest.fixture(autouse=True)
def _fixed_seed():
    torch.manual_seed(0)


@pytest.fixture
def data_dir():
    """The folder of real data sets; tests that need it are skipped where there is none."""
    path = os.environ.get("BBALPHA_DATA")
    if not path:
        pytest.skip("BBALPHA_DATA names no folder of data sets")
    return path
