import pytest

from bbalpha.experiments import extras


def test_a_missing_package_names_the_extra(monkeypatch):
    def missing(name):
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(extras, "import_module", missing)
    with pytest.raises(ModuleNotFoundError, match=r"need gpytorch; .*pip install 'bbalpha\[baselines\]'"):
        extras.extra("gpytorch.kernels")
