"""``python -m cupy_flash demo``: recognise handwritten digits by attention alone."""

from pathlib import Path

import numpy as np

import cupy_flash as cf
from cupy_flash import console
from cupy_flash.cli import devices, digits
from cupy_flash.cli.progress import Progress
from cupy_flash.device import cpu

INTRODUCTION = """\
cupy_flash demo: reading handwritten digits
===========================================
Data     scikit-learn's scanned digits, 8 x 8 pixels each: {train:,} images to learn from,
         {tune} to tune on and {test} to test with.
Method   A test image gets the average label of all training images, each weighted by its
         likeness: exp(-distance^2 / (2 h^2)). This is kernel regression, and it is attention:
         queries = test images, keys = training images, values = their labels.
         Nothing is trained except one number, the bandwidth h.
Device   {device}
"""


def add_arguments(parser):
    """Add the options of the command."""
    parser.add_argument("--picture", default="cupy_flash_demo.png", metavar="FILE",
                        help="where the picture is saved (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=20, metavar="N",
                        help="steps of gradient descent (default: %(default)s)")
    parser.add_argument("--shift", type=int, default=2, metavar="PIXELS",
                        help="the larger run adds training images shifted by up to this many "
                             "pixels, 0 to 3 (default: %(default)s)")
    parser.add_argument("--cpu", action="store_true", help="use the CPU even where a GPU is found")


def run(arguments) -> int:
    """Run the demo; return 0, 1 if the picture cannot be saved, 2 if it cannot begin at all."""
    if not (0 <= arguments.shift <= 3 and arguments.steps >= 0):
        console.say("--shift must be 0 to 3, and --steps at least 0")
        return 2
    try:
        from sklearn.datasets import load_digits

        from cupy_flash.cli import picture
    except ImportError as error:
        console.say("The demo needs scikit-learn for its data and matplotlib for its picture, and "
                    f"{error.name} is not installed.\nInstall both with:  "
                    "pip install scikit-learn matplotlib")
        return 2
    path = Path(arguments.picture)
    fault = picture.fault_of(path)
    if fault is not None:
        console.say(f"--picture: {fault}")
        return 2
    device, remark = _choose_device(arguments.cpu)
    data = split(*load_digits(return_X_y=True))
    sizes = {part: len(images) for part, (images, _) in data.items()}
    print(INTRODUCTION.format(device=f"{device.name} ({remark})" if remark else device.name,
                              **sizes))
    h = _fit(device, data, arguments.steps)
    _test(device, data, h)
    taken = _test_large(device, data, h, arguments.shift)
    try:
        _save_picture(picture, device, data, h, taken, path.absolute())
    except OSError as error:
        console.say(f"--picture: {path} cannot be written: {error.strerror}")
        return 1
    return 0


def split(images, labels):
    """Shuffle the images with a fixed seed and split them.

    Parameters
    ----------
    images : numpy.ndarray, shape (1797, 64)
        Grey values from 0 to 16.
    labels : numpy.ndarray, shape (1797,)

    Returns
    -------
    dict
        ``train``, ``tune``, ``test`` -> (images from 0 to 1 in float32, labels).
    """
    order = np.random.default_rng(0).permutation(len(images))
    images, labels = (images[order] / 16).astype(np.float32), labels[order]
    cuts = {"train": slice(0, 1097), "tune": slice(1097, 1397), "test": slice(1397, None)}
    return {part: (images[cut], labels[cut]) for part, cut in cuts.items()}


def _choose_device(cpu_only):
    """The first usable CUDA device or the CPU, and a remark on the choice."""
    threads = str(cpu()).split(", ")[1]
    if cpu_only:
        return devices.CpuDevice(), threads
    usable, reason = devices.cuda_devices()
    if usable:
        return usable[0], None
    return devices.CpuDevice(), f"{threads}; no GPU is used: {reason}"


def _fit(device, data, steps):
    """Part 1: the bandwidth."""
    images, labels = data["tune"]
    train, train_labels = data["train"]
    arrays = [digits.queries(images), digits.keys(train), digits.one_hot(train_labels),
              digits.one_hot(labels)]
    arrays = [device.asarray(x) for x in arrays]
    print(f"1. Fitting h on the {len(images)} tuning images by gradient descent, with the gradient "
          "from\n   cupy_flash.attention_vjp. (The first call on a machine compiles for some "
          "seconds.)\n", flush=True)
    lines = ["   step       h    log loss   accuracy"]

    def report(step, h, loss, accuracy):
        if step % 5 == 0 or step == steps:
            lines.append(f"   {step:4d}   {h:.4f}   {loss:8.4f}   {100 * accuracy:6.1f} %")
        progress.step()

    with Progress(steps + 1, "fitting h") as progress:
        h = digits.fit_bandwidth(
            lambda h: digits.loss_and_slope(device.xp, *arrays, h), 1.0, steps, report)
    print("\n".join(lines), end="\n\n")
    return h


def _test(device, data, h):
    """Part 2: the test images against training and tuning images together."""
    images, labels = data["test"]
    known, known_labels = _known(data)
    print(f"2. Reading the {len(images)} test images, none of which was used above, with "
          f"h = {h:.4f}.\n   {len(known):,} known images; {len(images) * len(known):,} weights.\n")
    arrays = digits.queries(images), digits.keys(known), digits.one_hot(known_labels)
    _compare(device, arrays, h, lambda p: np.mean(p.argmax(axis=1) == labels))


def _test_large(device, data, h, reach):
    """Part 3: the same with shifted copies, where the matrix of weights no longer is small.

    Returns the bars of the picture: titles, units, and values by name.
    """
    images, labels = data["test"]
    known, known_labels = _known(data)
    copies, query_reach = (2 * reach + 1) ** 2, min(reach, 1)
    votes = (2 * query_reach + 1) ** 2
    queries, keys = digits.shifted(images, query_reach), digits.shifted(known, reach)
    print(f"3. The same at a larger size: {copies} shifted copies of each known image, and {votes} "
          "of each\n   test image, whose answers are averaged. "
          f"{len(keys):,} known images, {len(queries):,} queries,\n"
          f"   {len(queries) * len(keys):,} weights.\n")

    def accuracy(p):
        voted = p.reshape(votes, len(images), -1).mean(axis=0)
        return np.mean(voted.argmax(axis=1) == labels)

    arrays = digits.queries(queries), digits.keys(keys), np.tile(digits.one_hot(known_labels),
                                                                 (copies, 1))
    times, memory = _compare(device, arrays, h, accuracy)
    return [(f"time for {len(queries) * len(keys) / 1e6:.0f} million weights", "ms",
             {name: 1e3 * seconds for name, seconds in times.items()}),
            ("memory for them", "MiB", {name: size / 2**20 for name, size in memory.items()})]


def _known(data):
    """The images whose labels may be used for the test: training and tuning ones."""
    parts = data["train"], data["tune"]
    return tuple(np.concatenate(column) for column in zip(*parts, strict=True))


def _compare(device, arrays, h, accuracy):
    """Run both ways of computing on the same arrays; print and return seconds and bytes of each."""
    q, k, v = (device.asarray(x) for x in arrays)
    plain = f"plain {'NumPy' if device.xp is np else 'CuPy'}"
    ways = {
        "cupy_flash": lambda: digits.regression(q, k, v, h),
        plain: lambda: digits.plain_regression(device.xp, q, k, v, h),
    }
    print(f"   {'':12}   accuracy        time   extra memory", flush=True)
    results, times, memory = {}, {}, {}
    with Progress(3 * len(ways), "measuring") as progress:
        for name, way in ways.items():
            results[name] = device.asnumpy(way())
            progress.step()
            times[name] = _seconds(device, way)
            progress.step()
            right, memory[name] = accuracy(results[name]), device.peak_bytes(way)
            progress.print(f"   {name:12}   {100 * right:6.1f} %   {_time(times[name]):>9}   "
                           f"{memory[name] / 2**20:9.1f} MiB")
            progress.step()
    difference = np.max(np.abs(results["cupy_flash"] - results[plain]))
    ratio = times[plain] / times["cupy_flash"]
    faster, slower, factor = ("cupy_flash", plain, ratio) if ratio >= 1 else (
        plain, "cupy_flash", 1 / ratio)
    verdict = "Both take the same time" if factor < 1.1 else (
        f"{faster} is {factor:.1f} times as fast as {slower}")
    print(f"\n   {verdict}; their probabilities differ by at most {difference:.0e}.\n")
    return times, memory


def _seconds(device, way):
    """The shortest time of a way of computing, with all threads of NumPy's library or with one.

    On a busy machine these threads wait for each other, and one alone can be many times faster.
    """
    from threadpoolctl import threadpool_limits

    times = [devices.seconds(device, way)]
    if device.xp is np:
        with threadpool_limits(1):
            times.append(devices.seconds(device, way))
    return min(times)


def _time(seconds):
    """Seconds as text with a fitting unit."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.1f} ms"


def _save_picture(picture, device, data, h, taken, path):
    """Part 4: all test images, and the three that the method was least sure of."""
    images, labels = data["test"]
    known, known_labels = _known(data)
    q, k, v = digits.queries(images), digits.keys(known), digits.one_hot(known_labels)
    p, lse = (device.asnumpy(x) for x in cf.attention(
        *(device.asarray(x) for x in (q, k, v)), scale=1 / h**2, return_lse=True))
    rows = []
    for i in np.argsort(p.max(axis=1), kind="stable")[:3]:
        title = f"a {labels[i]}, read as {p[i].argmax()}"
        best = picture.largest_weights(q[i], k, v, known, lse[i], h)
        rows.append({"image": images[i], "title": title, **best})
    picture.draw(path, (images, labels, p.argmax(axis=1)), rows, taken)
    print("4. The picture shows all test images as they were read, the three least certain ones "
          "with the\n   known images that they attended to most, and time and memory. Saved as\n"
          f"   {path}")
