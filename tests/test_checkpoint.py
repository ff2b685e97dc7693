import json
import math
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest
import safetensors.torch
import torch
from torch import nn

from bbalpha import _files as folders
from bbalpha import checkpoint
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


@pytest.mark.parametrize("name", ["notes.txt", "step-000000001", ".hidden"])
def test_a_model_folder_with_anything_else_in_it_is_not_replaced(name, tmp_path):
    save(mlp([1, 2, 1]), tmp_path / "m", alpha=0.25)
    (tmp_path / "m" / "detector.json").write_text("ours")
    save(mlp([1, 2, 1]), tmp_path / "m", alpha=0.5)  # nothing but our own files: replaced
    (tmp_path / "m" / name).mkdir()
    with pytest.raises(ValueError, match=f"holds {name!r} too, which would be lost"):
        save(mlp([1, 2, 1]), tmp_path / "m", alpha=0.75)
    assert (tmp_path / "m" / name).is_dir()
    assert read_folder(tmp_path / "m").content["alpha"] == 0.5


@pytest.mark.parametrize("dangling", [False, True])
def test_a_link_is_followed(dangling, tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "m").symlink_to(tmp_path / "disk" / "model")
    if not dangling:
        save(mlp([1, 2, 1]), tmp_path / "disk" / "model")
    for alpha in (0.25, 0.5):
        save(mlp([1, 2, 1]), tmp_path / "m", alpha=alpha)
        assert (tmp_path / "m").is_symlink()
        assert read_folder(tmp_path / "m").content["alpha"] == alpha
    assert [p.name for p in (tmp_path / "disk").iterdir()] == ["model"]
    assert [p.name for p in sorted(tmp_path.iterdir())] == ["disk", "m"]


def test_a_model_that_does_not_fit_stays_as_it_was(tmp_path):
    save(nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 4)), tmp_path / "m")
    others = [
        nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 5)),
        nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 4), nn.Linear(1, 1)),
        nn.Sequential(nn.Linear(2, 3)),
        nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 4, bias=False)),
    ]
    for model in others:
        before = {name: value.clone() for name, value in model.state_dict().items()}
        with pytest.raises(ValueError, match=r"does not have the shape of the saved one: '[12]\."):
            load(tmp_path / "m", model=model)
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        assert model.training
    lazy = nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 4))
    assert load(tmp_path / "m", model=lazy)[0].weight.shape == (3, 2)
    with pytest.raises(TypeError, match=r"torch\.nn\.Module"):
        load(tmp_path / "m", model="net")


def test_numbers_come_back_in_the_precision_they_had(tmp_path):
    for dtype in (torch.float64, torch.float16):
        net = mlp([3, 4, 1]).to(dtype)
        save(net, tmp_path / "m")
        back = load(tmp_path / "m")
        assert all(torch.equal(a, b) for a, b in zip(net.parameters(), back.parameters(), strict=True))
        assert {p.dtype for p in back.parameters()} == {dtype}


# ------------------------------------------------------------------------------ files that others made


def forge(folder, config, tensors=None):
    """A folder with any content whose checksums are right."""
    folder.mkdir()
    text = config if isinstance(config, bytes) else json.dumps(config).encode()
    weights = tensors if isinstance(tensors, bytes) else safetensors.torch.save(tensors or {})
    files = {"config.json": text, "weights.safetensors": weights}
    files["checksums.sha256"] = checkpoint._checksums(files)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder


def wrapped(content):
    return {"format": 1, "versions": {}, "content": content}


def model_of(architecture, state=None):
    return wrapped({"kind": "model", "architecture": architecture, "state": state or {}})


def layer(name, **options):
    return {"layer": "Sequential", "children": {"0": {"layer": name, **options}}}


FORGED = {
    "no json": b"{",
    "no text": b"\xff\xfe",
    "deep": b"[" * 100_000 + b"]" * 100_000,
    "a list": [1, 2],
    "a number": 3,
    "nothing": {},
    "no content": {"format": 1, "versions": {}},
    "versions of another kind": {"format": 1, "versions": 3, "content": {}},
    "versions of another format": {"format": 2, "versions": 3, "content": {}},
    "content is a list": wrapped([1, 2]),
    "content is a word": wrapped("model"),
    "a tensor that is not there": wrapped({"state": {"#": "tensor", "name": "w"}}),
    "a tensor without a name": wrapped({"state": {"#": "tensor"}}),
    "a tensor named by a list": wrapped({"state": {"#": "tensor", "name": [1]}}),
    "a float of letters": wrapped({"state": {"#": "float", "value": "abc"}}),
    "a float of lists": wrapped({"state": {"#": "float", "value": []}}),
    "a tuple without items": wrapped({"state": {"#": "tuple"}}),
    "items that are none": wrapped({"state": {"#": "items", "items": [1]}}),
    "items by lists": wrapped({"state": {"#": "items", "items": [[[1], 2]]}}),
    "no state": wrapped({"kind": "model"}),
    "a state of numbers": model_of(layer("ReLU"), {"0.weight": 3}),
    "a state that is a number": wrapped({"architecture": layer("ReLU"), "state": 3}),
    "no architecture": wrapped({"state": {}}),
    "an architecture of letters": model_of("Linear"),
    "an architecture of numbers": model_of(3),
    "a layer without a name": model_of({"children": {}}),
    "a layer named by a list": model_of({"layer": [1]}),
    "no children": model_of({"layer": "Sequential"}),
    "children in a list": model_of({"layer": "Sequential", "children": [1]}),
    "a child of letters": model_of({"layer": "Sequential", "children": {"0": "ReLU"}}),
    "a child named forward": model_of({"layer": "Sequential", "children": {"forward": {"layer": "ReLU"}}}),
    "a child named a.b": model_of({"layer": "Sequential", "children": {"a.b": {"layer": "ReLU"}}}),
    "missing sizes": model_of(layer("Linear")),
    "sizes of letters": model_of(layer("Linear", in_features="a", out_features=2)),
    "negative sizes": model_of(layer("Linear", in_features=-1, out_features=2)),
    "endless sizes": model_of(layer("Linear", in_features=10**30, out_features=2)),
    "a device": model_of(layer("Linear", in_features=1, out_features=1, device="cuda")),
    "a rate of letters": model_of(layer("Dropout", p="a")),
    "a rate above 1": model_of(layer("Dropout", p=7)),
    "groups that do not divide": model_of(layer("Conv2d", in_channels=3, out_channels=2, kernel_size=1, groups=2)),
    "weights that are not there": model_of(layer("Linear", in_features=1, out_features=1)),
}


@pytest.mark.parametrize("name", FORGED)
def test_forged_folders_get_a_sentence(name, tmp_path):
    folder = forge(tmp_path / "m", FORGED[name])
    with pytest.raises(ValueError, match=r"\w+ \w+") as caught:
        load(folder)
    assert len(str(caught.value)) > 30
    assert not str(caught.value).startswith(("invalid literal", "could not convert", "Expecting"))


def test_forged_weights_get_a_sentence(tmp_path):
    plain = {"layer": "Linear", "in_features": 1, "out_features": 1, "bias": False}
    told = {"weight": {"#": "tensor", "name": "w"}}
    with pytest.raises(CorruptModelError, match="not of the form that bbalpha writes"):
        load(forge(tmp_path / "a", model_of(plain, told), b"no tensors"))
    with pytest.raises(CorruptModelError, match="must be floating-point numbers"):
        load(forge(tmp_path / "b", model_of(plain, told), {"w": torch.ones(1, 1, dtype=torch.long)}))
    assert load(forge(tmp_path / "c", model_of(plain, told), {"w": torch.ones(1, 1)})).weight == 1


def test_nothing_is_allocated_before_the_weights_are_seen_to_fit(tmp_path, monkeypatch):
    devices = []
    plain = nn.init.kaiming_uniform_

    def spy(tensor, **options):
        devices.append(tensor.device.type)
        return plain(tensor, **options)

    monkeypatch.setattr(nn.init, "kaiming_uniform_", spy)
    wide = layer("Linear", in_features=500, out_features=500)
    with pytest.raises(ValueError, match=r"'0\.weight' is not in the file"):
        load(forge(tmp_path / "m", model_of(wide)))
    assert set(devices) == {"meta"}


# ------------------------------------------------------------------------------ several writers


def test_writers_of_one_folder_do_not_hinder_each_other(tmp_path):
    def work(alpha):
        for _ in range(8):
            save(mlp([1, 2, 1]), tmp_path / "m", alpha=alpha)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, [0.0, 0.25, 0.5, 0.75]))
    assert read_folder(tmp_path / "m").content["alpha"] in (0.0, 0.25, 0.5, 0.75)
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


def test_what_killed_writers_left_is_removed_by_the_next_one(tmp_path):
    save(mlp([1, 2, 1]), tmp_path / "m", alpha=0.25)
    (tmp_path / "m").rename(tmp_path / f".m.{'a' * 32}.old")  # killed between the two renames, then again in a write
    (tmp_path / f".m.{'b' * 32}.tmp").mkdir()
    (tmp_path / ".m.lock").touch()
    (tmp_path / f".n.{'c' * 32}.tmp").mkdir()  # of another one
    assert read_folder(tmp_path / "m").content["alpha"] == 0.25
    save(mlp([1, 2, 1]), tmp_path / "m", alpha=0.5)
    assert sorted(p.name for p in tmp_path.iterdir()) == [f".n.{'c' * 32}.tmp", "m"]
    assert read_folder(tmp_path / "m").content["alpha"] == 0.5


def test_the_config_is_for_people_too(tmp_path):
    save(mlp([3, 2, 1]), tmp_path / "m", alpha=0.5, preprocessing={"mean": [0.0, 1.0]})
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    assert config["content"]["alpha"] == 0.5
    assert config["content"]["preprocessing"] == {"mean": [0.0, 1.0]}
    assert config["versions"]["torch"].startswith(torch.__version__.split("+")[0])


@pytest.mark.parametrize(
    ("layer", "argument", "value"),
    [
        ("Dropout", "p", float("nan")), ("Dropout", "p", True), ("Dropout", "p", "0.5"), ("Linear", "bias", 1),
        ("Linear", "in_features", True), ("Linear", "in_features", 2**40), ("Conv2d", "kernel_size", [3, -1]),
        ("Conv2d", "padding", "os.system"), ("MaxPool2d", "stride", [2**40, 1]), ("GELU", "approximate", "nix"),
    ],
)  # fmt: skip
def test_layers_with_odd_arguments_are_refused(layer, argument, value):
    good = {
        "Linear": {"in_features": 1, "out_features": 1}, "MaxPool2d": {"kernel_size": 2},
        "Conv2d": {"in_channels": 1, "out_channels": 1, "kernel_size": 3},
    }.get(layer, {})  # fmt: skip
    build({"layer": layer, **good})
    with pytest.raises(CorruptModelError, match=rf"The file asks for a {layer} whose {argument} is"):
        build({"layer": layer, **good, argument: value})


def test_a_place_below_a_file_is_refused_before_anything_is_done(tmp_path):
    (tmp_path / "file").write_text("x")
    for place in (tmp_path / "file" / "model", tmp_path / "file" / "deep" / "model"):
        with pytest.raises(ValueError, match=r"`path` must lie in a folder; .*file' is a file"):
            checkpoint.check_replaceable(place)
