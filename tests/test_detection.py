"""Detection: the promised rate of false alarms, whatever the model; scores, reports, and detectors kept in folders."""

import json
import math
import re
from pathlib import Path

import pytest
import sklearn.metrics
import torch
from torch import nn

import bbalpha
from bbalpha import detection
from bbalpha.detection import Detector, conformal_threshold
from bbalpha.networks import mlp

SCORES = ["entropy", "mutual_information", "variation_ratio"]


def net(rate=0.5):
    return mlp([4, 16, 3], dropout=rate, input_dropout=0.0)


# ------------------------------------------------------------------------------ the guarantee


@pytest.mark.parametrize(("n", "false_alarm"), [(19, 0.05), (40, 0.05), (99, 0.1), (57, 0.3), (1000, 0.01)])
def test_a_new_score_is_above_the_threshold_as_often_as_promised(n, false_alarm):
    repeats = 2000
    draws = torch.randn(repeats, n, dtype=torch.float64)
    # the chance that a further normal number is above each threshold, exactly
    chance = [1 - torch.special.ndtr(torch.tensor(conformal_threshold(row, false_alarm))).item() for row in draws]
    mean = sum(chance) / repeats
    error = torch.tensor(chance).std().item() / math.sqrt(repeats)
    assert mean <= false_alarm + 4 * error
    assert mean >= false_alarm - 1 / (n + 1) - 4 * error


def test_ties_only_make_alarms_rarer():
    for _ in range(50):
        clean, new = (torch.randint(5, (size,)) / 5 for size in (60, 20000))
        threshold = conformal_threshold(clean, 0.25)
        k = math.ceil(61 * 0.75)
        assert (clean <= threshold).sum() >= k
        assert threshold in clean
        assert (clean < threshold).sum() < k
    many = [(new > conformal_threshold(torch.randint(5, (60,)) / 5, 0.25)).double().mean() for _ in range(300)]
    assert sum(many) / 300 <= 0.25


@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("score", SCORES)
def test_clean_rows_are_flagged_as_often_as_promised(score, seed):
    model, repeats, n, false_alarm = net(), 80, 39, 0.1
    rates = []
    for i in range(repeats):
        fixed = None if seed is None else seed + i
        detector = Detector(model, score=score, false_alarm=false_alarm, n_passes=6, seed=fixed)
        detector.fit(torch.randn(n, 4))
        rates.append(detector.flag(torch.randn(300, 4)).double().mean().item())
    mean, error = sum(rates) / repeats, torch.tensor(rates).std().item() / math.sqrt(repeats)
    assert mean <= false_alarm + 3 * error
    if score != "variation_ratio":  # steps of 1/6: ties
        assert mean >= false_alarm - 1 / (n + 1) - 3 * error


def test_fewer_rows_than_the_promise_needs_are_an_error():
    assert conformal_threshold(torch.arange(19.0), 0.05) == 18.0
    with pytest.raises(
        ValueError, match=r"`x_clean` must have at least 19 rows for a false-alarm rate of 0.05; got 18"
    ):
        Detector(net()).fit(torch.randn(18, 4))


# ------------------------------------------------------------------------------ scores and flags


@pytest.mark.parametrize("score", SCORES)
def test_scores_are_those_of_the_prediction(score):
    model, x = net(), torch.randn(30, 4)
    prediction = bbalpha.predict_classification(model, x, n_passes=20, masks="shared", seed=5)
    detector = Detector(model, score=score, n_passes=20, seed=5)
    assert torch.equal(detector.scores(x), getattr(prediction, score))
    torch.testing.assert_close(detector.scores(x[7:9]), detector.scores(x)[7:9])  # whatever the neighbours
    flags = detector.fit(x).flag(x)
    assert flags.dtype == torch.bool
    assert torch.equal(flags, detector.scores(x) > detector.threshold)


def test_without_a_seed_masks_are_fresh():
    detector, x = Detector(net(), n_passes=5), torch.randn(30, 4)
    assert not torch.equal(detector.scores(x), detector.scores(x))


def test_loaders_and_generators_are_taken_whole():
    detector, x = Detector(net(), n_passes=5, seed=0), torch.randn(30, 4)
    whole = detector.scores(x)
    for other in (torch.utils.data.DataLoader(x, batch_size=8), iter(x.split(8)), (x,), {"input": x}):
        torch.testing.assert_close(detector.scores(other), whole)
    with pytest.raises(ValueError, match="`x` must give at least one batch"):
        detector.scores(iter([]))


def test_a_plain_net_has_an_entropy_and_nothing_else():
    model, x = net(rate=0.0), torch.randn(200, 4)
    detector = Detector(model, false_alarm=0.1).fit(x)
    torch.testing.assert_close(detector.scores(x), torch.distributions.Categorical(logits=model(x)).entropy())
    assert detector.flag(x).sum() == 200 - math.ceil(201 * 0.9)
    with pytest.raises(ValueError, match="`mutual_information` needs at least 2 passes"):
        Detector(model, score="mutual_information").fit(x)


def test_without_passes_any_net_is_taken_as_it_is(tmp_path):
    model, x = net().train(), torch.randn(60, 4)
    detector = Detector(model, n_passes=None).fit(x)
    bbalpha.save(model, tmp_path / "model")
    detector.save(tmp_path / "model")
    again = Detector.load(tmp_path / "model", model)
    expected = torch.distributions.Categorical(logits=model.eval()(x)).entropy()
    for one in (detector, again):
        torch.testing.assert_close(one.scores(x), expected)


def test_the_model_is_as_it_was():
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 3)).train()
    state = {k: v.clone() for k, v in model.state_dict().items()}
    Detector(model, n_passes=5).fit(torch.randn(30, 4)).flag(torch.randn(30, 4))
    assert all(m.training for m in model.modules())
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())


# ------------------------------------------------------------------------------ report


def test_the_report_agrees_with_scikit_learn():
    model, clean, other = net(), torch.randn(150, 4), 0.3 * torch.randn(90, 4)
    detector = Detector(model, n_passes=20, seed=1, false_alarm=0.2).fit(torch.randn(100, 4))
    report = detector.report(clean, other)
    scores = torch.cat((detector.scores(clean), detector.scores(other))).numpy()
    truth = [0] * 150 + [1] * 90
    false, true, _ = sklearn.metrics.roc_curve(truth, scores, drop_intermediate=False)
    assert report.auroc == pytest.approx(sklearn.metrics.roc_auc_score(truth, scores))
    assert report.aupr == pytest.approx(sklearn.metrics.average_precision_score(truth, scores))
    assert report.fpr95 == pytest.approx(false[true >= 0.95][0])
    assert report.false_alarms == pytest.approx(detector.flag(clean).double().mean().item())
    assert report.caught == pytest.approx(detector.flag(other).double().mean().item())


def test_attacks_are_caught_more_often_than_clean_rows():
    torch.manual_seed(0)
    x = torch.randn(1500, 4).sigmoid()
    y = (x[:, 0] > x[:, 1]).long() + (x[:, 2] > 0.6).long()
    model = net(rate=0.2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for _ in range(150):
        optimizer.zero_grad()
        bbalpha.cross_entropy(bbalpha.sample(model, x[:500], 5), y[:500], alpha=0.5).backward()
        optimizer.step()
    detector = Detector(model, n_passes=20, seed=0, false_alarm=0.1).fit(x[500:1000])
    report = detector.report(x[1000:], bbalpha.fgsm(model, x[1000:], step=0.05))
    assert report.auroc > 0.55
    assert report.caught > report.false_alarms


# ------------------------------------------------------------------------------ folders


@pytest.fixture
def saved(tmp_path):
    model, folder = net(), tmp_path / "model"
    detector = Detector(model, score="mutual_information", false_alarm=0.2, n_passes=7, seed=4).fit(torch.randn(50, 4))
    bbalpha.save(model, folder)
    detector.save(folder)
    return detector, folder


def test_a_detector_comes_back_from_the_folder_of_its_model(saved):
    detector, folder = saved
    model = bbalpha.load(folder)  # a file more is no damage
    again = Detector.load(folder, model)
    for name in ("score", "false_alarm", "n_passes", "seed", "threshold"):
        assert getattr(again, name) == getattr(detector, name)
    x = torch.randn(40, 4)
    assert torch.equal(again.flag(x), detector.flag(x))
    assert sorted(p.name for p in folder.iterdir()) == [
        "checksums.sha256", "config.json", "detector.json", "weights.safetensors",
    ]  # fmt: skip


def test_other_weights_do_not_get_the_detector(saved):
    _, folder = saved
    with pytest.raises(ValueError, match="`model` must have the weights the detector was fitted with"):
        Detector.load(folder, net())
    bbalpha.save(net(), folder)
    with pytest.raises(FileNotFoundError, match="holds no detector"):
        Detector.load(folder, bbalpha.load(folder))


def test_any_changed_byte_is_noticed(saved):
    detector, folder = saved
    path = folder / "detector.json"
    data = path.read_bytes()
    assert json.loads(data)["detector"]["threshold"] == detector.threshold
    for i in range(len(data)):
        path.write_bytes(data[:i] + bytes([data[i] ^ 1]) + data[i + 1 :])
        with pytest.raises(ValueError, match="is damaged"):
            Detector.load(folder, detector.model)
    for odd in (data[:100], b'{"detector":' + b"[" * 100_000):
        path.write_bytes(odd)
        with pytest.raises(ValueError, match="is damaged"):
            Detector.load(folder, detector.model)


def test_a_file_of_another_format_is_refused(saved, monkeypatch):
    detector, folder = saved
    monkeypatch.setattr(detection, "_FORMAT", 2)
    detector.save(folder)
    monkeypatch.undo()
    with pytest.raises(ValueError, match="has format 2 and this bbalpha reads 1; fit the detector again"):
        Detector.load(folder, detector.model)


def test_a_failed_write_leaves_the_old_detector(saved, monkeypatch):
    detector, folder = saved
    before = (folder / "detector.json").read_bytes()

    def fail(self, target):
        raise OSError("disk full")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        detector.fit(torch.randn(50, 4)).save(folder)
    assert (folder / "detector.json").read_bytes() == before
    assert len(list(folder.iterdir())) == 4


# ------------------------------------------------------------------------------ mistakes and the guide


def test_mistakes_are_named(tmp_path):
    with pytest.raises(TypeError, match=r"`model` must be a torch.nn.Module; got str"):
        Detector("net")
    with pytest.raises(
        ValueError, match="`score` must be one of entropy, mutual_information, variation_ratio; got 'x'"
    ):
        Detector(net(), score="x")
    with pytest.raises(ValueError, match="`false_alarm` must lie between 0 and 1, both left out; got 1"):
        Detector(net(), false_alarm=1)
    for early in (lambda d: d.flag(torch.zeros(2, 4)), lambda d: d.save(tmp_path), lambda d: d.report(None, None)):
        with pytest.raises(RuntimeError, match=r"The detector must be fitted first; call fit\(x_clean\)"):
            early(Detector(net()))
    with pytest.raises(FileNotFoundError, match="`folder` must exist"):
        Detector(net()).fit(torch.randn(50, 4)).save(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"logits of one label a row, \(N, C\); got scores \(30, 4\)"):
        Detector(nn.Sequential(nn.Conv1d(1, 3, 3), nn.Dropout(0.5)), n_passes=3).fit(torch.randn(30, 1, 6))


def test_the_guide_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = (Path(__file__).parent.parent / "docs" / "adversarial.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) >= 4
    x = torch.rand(300, 4)
    names = {"net": net(), "plain_net": net(0.0), "x_held_out": x[:200], "x": x[200:], "y": torch.randint(3, (100,))}
    for block in blocks:
        if "foolbox" not in block:  # tests/test_attacks.py runs it
            exec(block, names)


def test_what_a_killed_writer_left_goes_and_stops_no_save(tmp_path):
    net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3))
    detector = Detector(net, false_alarm=0.1).fit(torch.randn(50, 2))
    folder = tmp_path / "m"
    bbalpha.save(net, folder)
    left = folder / f".detector.json.{'a' * 32}.tmp"
    left.write_text("half")
    detector.save(folder)
    assert not left.exists()
    left.write_text("half")
    bbalpha.save(net, folder)
    assert sorted(p.name for p in folder.iterdir()) == ["checksums.sha256", "config.json", "weights.safetensors"]
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


@pytest.mark.parametrize("change", [{"extra": 1}, {"score": None}, {"threshold": "high"}, {"threshold": None}])
def test_a_forged_detector_gets_a_sentence(change, tmp_path):
    net = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3))
    bbalpha.save(net, tmp_path / "m")
    Detector(net, false_alarm=0.1).fit(torch.randn(50, 2)).save(tmp_path / "m")
    file = tmp_path / "m" / "detector.json"
    file.write_bytes(detection._file(json.loads(file.read_text())["detector"] | change))
    with pytest.raises(ValueError, match=r"not of the form that bbalpha writes|`score` must be one of"):
        Detector.load(tmp_path / "m", net)
