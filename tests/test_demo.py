"""The demo: what it computes, what it claims, what it says when something is missing."""

import re
import sys

import numpy as np
import pytest
from sklearn.datasets import load_digits

import cupy_flash.cli
from cupy_flash.cli import demo, devices, digits, main, picture


@pytest.fixture(scope="module")
def data():
    """The images as the demo splits them."""
    return demo.split(*load_digits(return_X_y=True))


def problem(data, queries="tune", dtype=np.float32):
    """Queries, keys, values and wanted answers; the keys are the training images."""
    images, labels = data[queries]
    known, known_labels = data["train"]
    arrays = (digits.queries(images), digits.keys(known), digits.one_hot(known_labels),
              digits.one_hot(labels))
    return [x.astype(dtype) for x in arrays]


def by_distance(q, k, v, h):
    """Kernel regression as its definition says it, in float64, from the images alone."""
    q, k = q[:, :-1].astype(np.float64), k[:, :-1].astype(np.float64)
    weights = np.exp(-np.sum((q[:, None] - k) ** 2, axis=2) / (2 * h**2))
    return weights @ v / weights.sum(axis=1, keepdims=True)


def test_split_uses_every_image_once(data):
    sizes = [len(labels) for _, labels in data.values()]
    assert sizes == [1097, 300, 400]
    images, _ = load_digits(return_X_y=True)
    together = np.concatenate([images for images, _ in data.values()])
    assert np.array_equal(np.sort(together, axis=0), np.sort(images / 16, axis=0))


@pytest.mark.parametrize("h", [0.2, 0.33, 2.0])
def test_attention_is_kernel_regression(data, h):
    q, k, v, _ = problem(data)
    truth = by_distance(q, k, v, h)
    assert np.max(np.abs(digits.regression(q, k, v, h) - truth)) < 1e-4
    assert np.max(np.abs(digits.plain_regression(np, q, k, v, h) - truth)) < 1e-4


@pytest.mark.parametrize("h", [0.25, 0.33, 1.0])
def test_slope_is_the_derivative_of_the_loss(data, h):
    arrays = problem(data, dtype=np.float64)
    step = 1e-5

    def loss(log_h):
        return digits.loss_and_slope(np, *arrays, np.exp(log_h))[0]

    slope = digits.loss_and_slope(np, *arrays, h)[1]
    difference = (loss(np.log(h) + step) - loss(np.log(h) - step)) / (2 * step)
    assert abs(slope - difference) < 1e-7


def test_fit_finds_the_best_bandwidth(data):
    arrays = problem(data)
    losses = []
    h = digits.fit_bandwidth(lambda h: digits.loss_and_slope(np, *arrays, h), 1.0, 20,
                             lambda step, h, loss, accuracy: losses.append(loss))
    assert losses == sorted(losses, reverse=True) or losses[-1] - min(losses) < 1e-6
    around = [digits.loss_and_slope(np, *arrays, h * factor)[0] for factor in (0.8, 1.25)]
    assert losses[-1] < min(around) and losses[-1] < losses[0] / 10


def test_shifted_images():
    image = np.arange(64, dtype=np.float32).reshape(1, 64) + 1
    copies = digits.shifted(image, 1).reshape(3, 3, 8, 8)
    square = image.reshape(8, 8)
    assert np.array_equal(copies[1, 1], square)
    assert np.array_equal(copies[0, 1, 1:], square[:-1]) and not copies[0, 1, 0].any()
    assert np.array_equal(copies[1, 2, :, :-1], square[:, 1:]) and not copies[1, 2, :, -1].any()
    assert np.array_equal(digits.shifted(image, 0), image)
    two = digits.shifted(np.concatenate([image, -image]), 1)
    assert np.array_equal(two[0::2], -two[1::2])


def test_memory_is_not_that_of_the_matrix(data):
    q, k, v, _ = problem(data, "test")
    k, v = np.tile(k, (20, 1)), np.tile(v, (20, 1))
    matrix = 4 * len(q) * len(k)
    cpu = devices.CpuDevice()
    assert cpu.peak_bytes(lambda: digits.plain_regression(np, q, k, v, 0.33)) > matrix
    assert cpu.peak_bytes(lambda: digits.regression(q, k, v, 0.33)) < matrix / 20


def test_largest_weights_are_those_of_the_softmax(data):
    q, k, v, _ = problem(data)
    images, labels = data["train"]
    score = (k @ q[0] / 0.33**2).astype(np.float64)
    lse = np.log(np.sum(np.exp(score - score.max()))) + score.max()
    best = picture.largest_weights(q[0], k, v, images, lse, 0.33)
    order = np.argsort(-score)[: picture.SHOWN_KEYS]
    assert np.array_equal(best["key_images"], images[order])
    assert np.array_equal(best["key_labels"], labels[order])
    assert np.allclose(best["weights"], np.exp(score[order] - lse), rtol=1e-3)


def test_the_picture_shows_what_was_read(monkeypatch):
    """The colour of an image is that of the digit read, a frame marks a mistake, all is there."""
    drawn = []
    monkeypatch.setattr(picture.Figure, "savefig", lambda self, path, **_: drawn.append(self))
    images, truth, read = np.ones((3, 64)), np.array([0, 1, 2]), np.array([0, 9, 2])
    row = {"image": images[0], "title": "a 1, read as 9", "key_images": images,
           "key_labels": truth, "weights": np.array([0.5, 0.3, 0.2])}
    picture.draw("x.png", (images, truth, read), [row], [
        ("time", "ms", {"cupy_flash": 1.0, "plain NumPy": 2.0}),
        ("memory", "MiB", {"cupy_flash": 1.0, "plain NumPy": 20.0})])
    mosaic, *rest = drawn[0].axes
    step = digits.SIDE + 1
    shown = mosaic.images[0].get_array()[1, 1 :: step][:3]
    palette = picture.matplotlib.colormaps["tab10"]
    assert np.allclose(shown, [0.8 * np.array(palette(digit)[:3]) for digit in read])
    (frame,) = mosaic.patches
    assert step - 1 < frame.get_x() < step and "a 1 as 9" in mosaic.get_title()
    assert [axis.get_title() for axis in rest] == [
        "a 1, read as 9", "a 0: 50 %", "a 1: 30 %", "a 2: 20 %", *[""] * 5, "time", "memory"]
    lengths = [[bar.get_width() for bar in axis.patches] for axis in rest[-2:]]
    assert lengths == [[1.0, 2.0], [1.0, 20.0]]


def test_demo_as_a_whole(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    path = tmp_path / "digits.png"
    assert main(["demo", "--picture", str(path), "--steps", "8", "--shift", "1"]) == 0
    text = capsys.readouterr().out
    accuracies = re.findall(r"^   (cupy_flash|plain NumPy) +(\d+\.\d) %", text, re.MULTILINE)
    assert [name for name, _ in accuracies] == ["cupy_flash", "plain NumPy"] * 2
    assert all(float(percent) >= 98 for _, percent in accuracies)
    assert accuracies[0][1] == accuracies[1][1] and accuracies[2][1] == accuracies[3][1]
    differences = re.findall(r"differ by at most (\S+)\.", text)
    assert len(differences) == 2 and all(float(x) < 1e-4 for x in differences)
    assert re.search(r"^      8   0\.3\d+ .* 98\.\d %$", text, re.MULTILINE)
    assert str(path) in text
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" and path.stat().st_size > 10_000


@pytest.mark.parametrize("package", ["sklearn.datasets", "matplotlib.figure"])
def test_a_missing_package_is_named(package, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, "cupy_flash.cli.picture", raising=False)
    monkeypatch.delattr(cupy_flash.cli, "picture", raising=False)
    assert main(["demo"]) == 2
    error = capsys.readouterr().err
    assert package in error and 'pip install scikit-learn matplotlib' in error


@pytest.mark.parametrize("option", [["--shift", "4"], ["--shift", "-1"], ["--steps", "-1"]])
def test_senseless_options_are_refused(option, capsys):
    assert main(["demo", *option]) == 2
    assert "--shift must be 0 to 3" in capsys.readouterr().err
