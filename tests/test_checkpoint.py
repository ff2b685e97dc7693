import json
import math
import shutil
import subprocess

import pytest
import torch
from torch import nn

from bbalpha import checkpoint, folders
from bbalpha.checkpoint import CorruptModelError, build, describe, load, read_folder, save, write_folder
from bbalpha.layers import Dropout
from bbalpha.networks import cnn, mlp


class Own(nn.Module):
    def __init__(self, width=3):
        super().__init__()
        self.a = nn.Linear(2, width)
        self.b = self.a  # one layer under two names
        self.norm = nn.BatchNorm1d(width)

    def forward(self, x):
        return self.norm(self.b(x))


@pytest.mark.parametrize(
    "net",
    [
        mlp([4, 5, 1], dropout=0.1),
        cnn(filters=2, hidden=3),
        nn.Sequential(nn.Sequential(nn.Linear(4, 2, bias=False), nn.Tanh()), Dropout(0.25)),
    ],
    ids=["mlp", "cnn", "nested"],
)
def test_a_network_of_plain_layers_comes_back_without_help(net, tmp_path):
    save(net, tmp_path / "m", alpha=0.5, precision=2.0)
    back = load(tmp_path / "m")
    assert str(back) == str(net)
    x = torch.randn(2, 1, 28, 28) if isinstance(net[0], nn.Conv2d) else torch.randn(7, 4)
    assert torch.equal(back(x), net.eval()(x))
    assert not back.training


def test_a_model_of_ones_own_is_passed_in(tmp_path):
    net = Own()
    net(torch.randn(5, 2))  # running statistics move
    save(net, tmp_path / "m")
    with pytest.raises(ValueError, match="load\\(path, model="):
        load(tmp_path / "m")
    back = load(tmp_path / "m", model=Own())
    assert back.a is back.b
    assert all(torch.equal(v, net.state_dict()[k]) for k, v in back.state_dict().items())
    with pytest.raises(ValueError, match="does not have the shape"):
        load(tmp_path / "m", model=Own(width=4))


def test_what_a_plain_list_cannot_rebuild_is_not_described():
    layer = nn.Linear(2, 2)
    assert describe(nn.Sequential(layer, layer)) is None
    assert describe(nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)))) is None
    assert describe(nn.Sequential(nn.MaxPool2d(2, dilation=2))) is None
    assert describe(nn.Conv2d(1, 1, 3, padding_mode="circular")) is None
    hooked = nn.ReLU()
    hooked.register_forward_hook(lambda *_: None)
    assert describe(hooked) is None


def test_a_file_cannot_name_code():
    with pytest.raises(ValueError, match="does not know"):
        build({"layer": "os.system", "command": "true"})


def test_every_changed_byte_is_noticed(tmp_path):
    save(mlp([1, 2, 1]), tmp_path / "m", training={"epochs": 3})
    for file in sorted((tmp_path / "m").iterdir()):
        data = file.read_bytes()
        for place in range(len(data)):
            file.write_bytes(data[:place] + bytes([data[place] ^ (1 << place % 8)]) + data[place + 1 :])
            with pytest.raises(CorruptModelError, match="damaged"):
                load(tmp_path / "m")
        for other in (data[:-1], data + b"\n", b""):
            file.write_bytes(other)
            with pytest.raises(CorruptModelError):
                load(tmp_path / "m")
        file.unlink()
        with pytest.raises(CorruptModelError, match="has no"):
            load(tmp_path / "m")
        file.write_bytes(data)
    load(tmp_path / "m")


@pytest.mark.skipif(not shutil.which("sha256sum"), reason="needs sha256sum")
def test_checksums_are_those_of_sha256sum(tmp_path):
    save(mlp([1, 2, 1]), tmp_path / "m")
    subprocess.run(["sha256sum", "--check", "--strict", "checksums.sha256"], cwd=tmp_path / "m", check=True)


def test_another_format_is_refused_with_a_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "FORMAT", 2)
    save(mlp([1, 2, 1]), tmp_path / "m")
    monkeypatch.undo()
    with pytest.raises(ValueError, match=r"has format 2 and this bbalpha reads format 1"):
        load(tmp_path / "m")


def test_values_come_back_as_they_were(tmp_path):
    content = {
        "numbers": [1, 2.5, -0.0, math.inf, 1e-310, True, None],
        "tuple": (1, ("a", {})),
        "keys": {0: torch.arange(3), 1: {"#": 1}},
        "half": torch.randn(3).half(),
        "scalar": torch.tensor(3.0, dtype=torch.float64),
    }
    write_folder(tmp_path / "f", content)
    back = read_folder(tmp_path / "f").content
    assert str(back) == str(content)
    assert math.copysign(1, back["numbers"][2]) == -1
    assert type(back["tuple"]) is tuple
    write_folder(tmp_path / "f", {"nan": math.nan})  # replaces
    assert math.isnan(read_folder(tmp_path / "f").content["nan"])
    with pytest.raises(TypeError, match=r"got function at 'a\.b'"):
        write_folder(tmp_path / "f", {"a": {"b": lambda: 0}})


def test_a_failed_or_interrupted_write_leaves_the_older_model(tmp_path, monkeypatch):
    save(mlp([1, 2, 1]), tmp_path / "m", alpha=0.25)

    def dies(*_):
        raise OSError("no space left")

    monkeypatch.setattr(folders, "write_file", dies)
    with pytest.raises(OSError, match="no space"):
        save(mlp([1, 2, 1]), tmp_path / "m", alpha=0.75)
    monkeypatch.undo()
    assert read_folder(tmp_path / "m").content["alpha"] == 0.25
    assert [p.name for p in tmp_path.iterdir()] == ["m"]
    (tmp_path / "m").rename(tmp_path / ".m.old")  # as left by a kill between the two renames
    assert read_folder(tmp_path / "m").content["alpha"] == 0.25


def test_other_peoples_folders_are_left_alone(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="Choose another name"):
        save(mlp([1, 2, 1]), tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "nothing")
    with pytest.raises(TypeError, match=r"must be a torch\.nn\.Module"):
        save({}, tmp_path / "m")


def test_the_config_is_for_people_too(tmp_path):
    save(mlp([3, 2, 1]), tmp_path / "m", alpha=0.5, preprocessing={"mean": [0.0, 1.0]})
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    assert config["content"]["alpha"] == 0.5
    assert config["content"]["preprocessing"] == {"mean": [0.0, 1.0]}
    assert config["versions"]["torch"].startswith(torch.__version__.split("+")[0])
