"""The paper's data sets by name: found on this machine or downloaded, checked, split as published."""

from bbalpha.data.download import DownloadError
from bbalpha.data.sets import Entry, Images, UCIData, cache_folder, catalogue, fetch, load_mnist, load_notmnist
from bbalpha.data.sets import load_uci as load_uci
from bbalpha.data.sets import uci_splits as uci_splits

__all__ = [
    "DownloadError", "Entry", "Images", "UCIData", "cache_folder", "catalogue", "fetch", "load_mnist", "load_notmnist",
    "load_uci", "uci_splits",
]  # fmt: skip
