"""The benchmarks start, their contenders train the same, and their figures are judged rightly."""

import concurrent.futures
import json
import os
import pathlib
import subprocess
import sys

import pytest
from PIL import Image

BENCHMARKS = pathlib.Path(__file__).parent.parent / "benchmarks"
sys.path.append(str(BENCHMARKS))

import driver
import goals
import plots
import report
import results
import run

# Ray takes longer to start than all of the others together.
SMALL = [benchmark for benchmark in run.SUITE if benchmark.name != "parameter-servers"]


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A folder with the results of every benchmark at tiny sizes."""
    folder = tmp_path_factory.mktemp("results")
    # As a shell would start them: without the devices that these tests asked for.
    asked = ("XLA_FLAGS", "NPROC", "PJRT_NPROC", "JAX_NUM_CPU_DEVICES")
    environment = {k: v for k, v in os.environ.items() if k not in asked}
    # Nothing is timed here: most of the work would be XLA's, making tiny programs quick.
    environment |= {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}

    def run_small(command):
        done = subprocess.run(
            [sys.executable, *command, "--small"],
            capture_output=True,
            text=True,
            timeout=200,
            env=environment,
        )
        assert done.returncode == 0, f"{command[0]}\n{done.stderr}"

    gpu = ["--workloads", "loop", "--without-torch", "--out", folder]
    commands = [[BENCHMARKS / "gpu" / "run.py", *gpu]]
    commands += [[BENCHMARKS / b.script, "--json", folder / f"{b.name}.json"] for b in SMALL]
    # Two at a time: much of each is waiting for its contenders to start.
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        list(pool.map(run_small, commands))
    return folder


def test_every_benchmark_runs_and_its_contenders_agree(small):
    found = {b.name: json.loads((small / f"{b.name}.json").read_text()) for b in SMALL}
    for name, result in found.items():
        assert result["name"] == name
        assert result["versions"]["jax"]["jax"]
        for case in result["cases"]:
            for figures in case["contenders"].values():
                assert figures["median"] > 0
    # What the goals look at is there, but for the peers that are not.
    peers = ("TensorFlow", "PyTorch")
    for goal, value in goals.standing(found):
        names = [case["name"] for case in found[goal.result]["cases"]]
        if goal.case in names and not any(peer in goal.what for peer in peers):
            assert value is not None, goal


def test_the_gpu_benchmark_runs_without_a_gpu(small):
    (case,) = json.loads((small / "gpu-loop.json").read_text())["cases"]
    assert case["failures"] == {}
    assert set(case["contenders"]) == {"jax", "functional", "variables"}
    (case,) = json.loads((small / "gpu-mock-8.json").read_text())["cases"]
    mock = case["contenders"]["mirrored"]
    assert mock["devices"] == 8
    assert mock["collectives"]["all-reduce"]["count"] == 1


def contender(body, **more):
    return driver.Process("it", [sys.executable, "-c", body], **more)


def test_a_contender_that_hangs_or_ends_is_named():
    hangs = contender("import time; time.sleep(60)", patience=0.2)
    with pytest.raises(driver.ContenderError, match=r"it: did not answer for 0\.2 s"):
        _ = hangs.versions
    ends = contender("raise SystemExit('no such device')")
    with pytest.raises(driver.ContenderError, match=r"it: ended with 1\nno such device"):
        _ = ends.versions
    ends.end()


def test_another_training_is_refused():
    driver.compare_curves({"a": [1.0, 0.5], "b": [1.00001, 0.5]}, 1e-4)
    with pytest.raises(driver.ContenderError, match=r"the losses of b are 2\.00e-02 off"):
        driver.compare_curves({"a": [1.0, 0.5], "b": [1.0, 0.51]}, 1e-4)
    with pytest.raises(driver.ContenderError, match="nan"):
        driver.compare_curves({"a": [1.0], "b": [float("nan")]}, 1e-4)


def case(rounds, **ratios):
    contenders = {"ours": {"rounds": rounds}, "theirs": {"rounds": [100.0] * len(rounds)}}
    return {"name": "it", "cases": [{"name": "c", "contenders": contenders, "ratios": ratios}]}


@pytest.mark.parametrize(
    ("before", "after", "worse"),
    [
        ([100, 101, 102, 103], [110, 111, 112, 113], True),
        ([100, 101, 102, 103], [104, 105, 106, 107], False),  # by less than 5 %
        ([80, 101, 102, 125], [85, 111, 112, 130], False),  # the rounds overlap
        ([110, 111, 112, 113], [100, 101, 102, 103], False),
    ],
)
def test_what_got_worse_is_told_beyond_noise(before, after, worse):
    old, new = case(before), case(after)
    for result in (old, new):
        item = result["cases"][0]
        item["ratios"]["ours / theirs"] = results.ratio(item["contenders"], "ours", "theirs")
    assert bool(list(results.what_got_worse(old, new))) == worse


def test_a_single_reading_has_to_be_far_off():
    old = case([1.0], **{"ours / theirs, compile": 1.0})
    assert not list(results.what_got_worse(old, case([1.0], **{"ours / theirs, compile": 1.2})))
    (line,) = results.what_got_worse(old, case([1.0], **{"ours / theirs, compile": 1.3}))
    assert line == "it, c: ours / theirs, compile rose from 1.000 to 1.300"


def test_a_goal_says_what_it_is():
    goal = goals.Goal("it", "c", "ours / theirs", 1.05)
    found = case([1.0], **{"ours / theirs": 1.2})
    assert goal.verdict(goal.value(found)) == "MISSED"
    assert goal.text(1.2) == "ours / theirs: 1.200, at most 1.05"
    assert goal.verdict(goal.value(case([1.0]))) == "not measured"
    assert goal.verdict(1.05) == "met"


def test_an_interrupted_result_leaves_the_old_one(tmp_path):
    path = tmp_path / "it.json"
    results.write_result(str(path), "it", [], {}, [])
    first = path.read_text()
    with pytest.raises(TypeError):
        results.write_result(str(path), "it", [{"a": object()}], {}, [])
    assert path.read_text() == first


def test_the_page_is_what_the_results_say():
    found = report.read_results()
    assert report.PAGE.read_text() == report.page(found), "run: python benchmarks/report.py"
    for name in found.keys() & plots.DRAWN_BY.keys():
        with Image.open(report.PLOTS / f"{name}.png") as image:
            assert image.text["Source"] == plots.digest(found[name]), name
