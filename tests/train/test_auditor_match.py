"""InfoNCE over the batches of all processes: two processes find what one finds on the whole batch."""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest
import torch

from guardpaint.audit.model import Text
from guardpaint.testing import small
from guardpaint.train import auditor_match
from guardpaint.train.auditor_loss import info_nce

PROMPTS = ["a red coat", "a statue", "", "two people on a very long road by the sea", "a hat", "an old blue door"]

PROCESS = """
import sys
import torch, torch.distributed as dist
sys.path.insert(0, sys.argv[1])
from test_auditor_match import PROMPTS, matched, pictures
dist.init_process_group("gloo")
rank, own = dist.get_rank(), len(PROMPTS) // dist.get_world_size()
mine = slice(rank * own, (rank + 1) * own)
loss, gradients = matched(pictures()[mine], PROMPTS[mine])
for gradient in gradients.values():  # the mean that data-parallel training takes
    dist.all_reduce(gradient)
    gradient /= dist.get_world_size()
torch.save({"loss": loss, "gradients": gradients}, f"{sys.argv[2]}/{rank}.pt")
dist.barrier()  # a process that leaves early takes the connection away from the others
dist.destroy_process_group()
"""


def pictures():
    return torch.rand(len(PROMPTS), 3, 64, 64, generator=torch.Generator().manual_seed(0))


def matched(images, prompts):
    """The InfoNCE loss of a process, and the gradients of all parameters that it reaches.

    The auditor is in evaluation mode: batch normalisation would see other batches in one process than in two.
    """
    torch.set_num_threads(1)
    model = small.auditor().eval()
    visual = model.features(images)
    text = Text(*model.text(model.token_ids(prompts)))
    loss = info_nce(auditor_match.batch_cosines(model, visual, text), model.log_temperature)
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("count", [2, 3])
def test_processes_find_the_loss_and_the_gradients_of_the_whole_batch(tmp_path, count):
    """Prompts of different lengths in each process; value and gradients of backbone, text encoder and heads agree."""
    loss, gradients = matched(pictures(), PROMPTS)
    assert {"backbone", "text", "attention", "image_proj", "text_proj"} <= {n.split(".")[0] for n in gradients}
    script = tmp_path / "process.py"
    script.write_text(PROCESS)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, str(script), os.path.dirname(__file__), str(tmp_path)]
    places = [{"RANK": str(k), "WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
              for k in range(count)]  # fmt: skip
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    running = [subprocess.Popen(command, env=env | place, stderr=subprocess.PIPE, text=True) for place in places]
    for process in running:
        _, problem = process.communicate(timeout=240)
        assert process.returncode == 0, problem[-2000:]
    for k in range(count):
        found = torch.load(tmp_path / f"{k}.pt", weights_only=True)
        torch.testing.assert_close(found["loss"], loss, atol=1e-6, rtol=1e-5)
        assert found["gradients"].keys() == gradients.keys()
        for name, gradient in gradients.items():
            torch.testing.assert_close(
                found["gradients"][name], gradient, atol=2e-6, rtol=1e-3, msg=lambda m, n=name: f"{n}: {m}"
            )


def test_images_in_groups_give_the_same(monkeypatch):
    """With room for few attention weights the images are taken one by one, and computed again for the gradient."""
    loss, gradients = matched(pictures(), PROMPTS)
    monkeypatch.setattr(auditor_match, "LARGEST", 1)
    other, again = matched(pictures(), PROMPTS)
    torch.testing.assert_close(other, loss)
    assert all(torch.allclose(again[name], g, atol=1e-6) for name, g in gradients.items())


def test_more_prompts_than_images():
    """A row of the images of one process against the prompts of all."""
    model = small.auditor().eval()
    visual = model.features(pictures()[:2])
    text = Text(*model.text(model.token_ids(PROMPTS)))
    cosines = auditor_match.pairwise_cosines(model, visual, text)
    assert cosines.shape == (2, len(PROMPTS))
    for j, prompt in enumerate(PROMPTS):
        alone = Text(*model.text(model.token_ids([prompt, prompt])))
        torch.testing.assert_close(
            cosines[:, j], model.heads(visual, alone, torch.zeros(2)).cosine, atol=1e-5, rtol=1e-4
        )
