"""The pytest plugin: a fixture, and nothing that costs a test run without it anything.

def test_my_network_samples(assert_samples):
    assert_samples(make_network(), torch.randn(8, 20))
"""

from collections.abc import Callable

import pytest


@pytest.fixture(scope="session")
def assert_samples() -> Callable[..., None]:
    """`bbalpha.testing.assert_samples`: fails where passes of a model are the same, or a random site draws nothing."""
    from bbalpha import testing

    return testing.assert_samples
