"""Alignment on two processes: one batch's statistics, one set of weights, one writer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import small_inpainter
from pictures import small_pairs
from processes import GAINS, trained

from guardpaint.data.pairs import PairStore
from guardpaint.draft.loading import load_pipeline
from guardpaint.policy import Policy
from guardpaint.train.pair_latents import encode_pairs

TESTS = Path(__file__).parents[1]


def environment():
    path = os.pathsep.join([str(TESTS), *sys.path])
    return {
        **os.environ,
        "PYTHONPATH": path,
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "ACCELERATE_USE_CPU": "true",
    }


def test_two_processes_have_the_means_and_the_cap_of_the_whole_batch(tmp_path):
    """Unsafe gains −0.5, 0.1 here and −0.1, 0.05 there: mean −0.1125 on both, so −0.5 is capped at −0.16875."""
    running = [
        subprocess.Popen([sys.executable, TESTS / "processes.py", str(rank), tmp_path], env=environment())
        for rank in range(2)
    ]
    assert [p.wait(120) for p in running] == [0, 0]
    for rank, capped in enumerate(([0.2, -0.16875, 0.0, 0.1], [0.4, -0.1, 0.2, 0.05])):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert found["capped"] == pytest.approx(capped)
        assert found["unsafe"] == pytest.approx(-0.1125) and found["safe"] == pytest.approx(0.2)
        assert found["identity"] == pytest.approx(float(GAINS.abs().mean()))


LAUNCH = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def test_losses_in_parts_leave_two_processes_with_one_model(tmp_path):
    """Every part's gradient is averaged: both have the weights that one process gets from whole batches."""
    words = [sys.executable, *LAUNCH, TESTS / "processes.py", "fit", tmp_path]
    done = subprocess.run(words, env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    (count, first), (_, second) = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))
    whole = trained(tmp_path / "one", 1).state_dict()
    assert count == 2
    for name, value in whole.items():
        assert torch.equal(first[name], second[name])
        torch.testing.assert_close(first[name], value)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["sft", "bco"])
def test_a_run_under_accelerate(tmp_path, method):
    """Two parts a step and a second pass in each: the run ends, is resumed, and saves one model."""
    small_inpainter(tmp_path / "inpainter")
    pipe = load_pipeline(tmp_path / "inpainter")
    for split in ("train", "validation"):
        small_pairs(tmp_path / "pairs", split, {"safe": 4, "nudity": 2, "violence": 2})
    for split in ("train", "validation"):
        encode_pairs(PairStore(tmp_path / "pairs"), split, pipe, Policy.default())
    train = {"steps": 3, "batch_size": 4, "accumulate": 2, "learning_rate": 0.01, "warmup": 1, "validate_every": 1}
    config = {"model": {"method": method, "rank": 2, "unroll_every": 1}, "train": train}
    (tmp_path / "c.yaml").write_text(json.dumps(config))
    out = tmp_path / "run"
    words = [*LAUNCH, "-m", "guardpaint.cli", "train", "stage", method, "--config", tmp_path / "c.yaml", "--out", out,
             "--set", f"inpainter={tmp_path / 'inpainter'}", "--set", f"pairs={tmp_path / 'pairs'}"]  # fmt: skip
    for more in (["--minutes", "0"], []):
        done = subprocess.run(
            [sys.executable, *words, *more], env=environment(), capture_output=True, text=True, timeout=400
        )
        assert done.returncode == 0, done.stderr[-3000:]
        assert (out / "model").exists() == (not more)
    assert done.stdout.count("saved to") == 1
    assert json.loads((out / "model/card.json").read_text())["trained_on"]["processes"] == 2
    assert len((out / "loss.csv").read_text().splitlines()) == 4 == len((out / "watch.csv").read_text().splitlines())
    assert json.loads((out / "run.json").read_text())["step"] == 3
    weights = torch.load(out / "state.pt", weights_only=True)["model"]
    assert any(v.abs().max() > 0 for k, v in weights.items() if "lora_B" in k)
