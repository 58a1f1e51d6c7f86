"""The other device finds planted leaks, lets through what CUDA lets through, and leaves no trace."""

from __future__ import annotations

import copy
import io
import os
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load, save
from torch import nn

from guardpaint.testing.other_device import OTHER, MixedDevices, OtherTensor, other_device
from guardpaint.testing.other_tensor import GENERATOR
from guardpaint.train.engine import Ema


@pytest.fixture
def device():
    with other_device() as device:
        yield device


inside = pytest.mark.usefixtures("device")


class Net(nn.Module):
    """A convolution, a normalisation and a head; `leak` plants a fault that works on the CPU."""

    def __init__(self, leak: str = "", seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.conv, self.norm, self.head = nn.Conv2d(3, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.Linear(4, 3)
        self.register_buffer("weights", torch.tensor([1.0, 2.0, 3.0]))
        self.leak, self.scale, self.seen = leak, torch.tensor([1.0, 2.0, 0.5, 1.0]), []

    def forward(self, x):
        x = self.norm(self.conv(x)).relu()
        self.seen.append(x.mean((2, 3)).cpu() if self.leak == "hook" and self.seen else x.mean((2, 3)))
        if self.leak == "buffer":
            x = x * self.scale[:, None, None]
        if self.leak == "mask":
            x = torch.where(torch.ones(x.shape[-2:]) > 0, x, torch.zeros_like(x))
        return self.head(x.mean((2, 3)))


def pictures(n: int = 2) -> torch.Tensor:
    return torch.rand(n, 3, 8, 8, generator=torch.Generator().manual_seed(0)).to(OTHER)


def labels(n: int = 2) -> torch.Tensor:
    return torch.arange(n, device=OTHER) % 3


def net(leak: str = "") -> Net:
    return Net(leak).to(OTHER)


def unregistered_buffer():
    net("buffer")(pictures())


def mask_on_the_cpu():
    net("mask")(pictures())


def activations_stored_mixed():
    model = net("hook")
    model(pictures()), model(pictures())
    torch.cat(model.seen)


def loss_weights_on_the_cpu():
    F.cross_entropy(net()(pictures()), labels(), weight=torch.tensor([1.0, 2.0, 3.0]))


def adding_a_cpu_tensor():
    return pictures() + torch.zeros(3, 8, 8)


def stacking_scalars():
    torch.stack([pictures().mean(), torch.tensor(0.0)])


def concatenating():
    torch.cat([pictures(), torch.zeros(1, 3, 8, 8)])


def tensor_without_a_device():
    return pictures() * torch.tensor([0.5, 0.5, 0.5]).view(3, 1, 1)


def numpy_at_once():
    pictures().numpy()


def array_at_once():
    np.asarray(pictures())


def generator_of_the_cpu():
    torch.randn(2, 3, generator=torch.Generator().manual_seed(0), device=OTHER)


def generator_of_the_cpu_for_an_order():
    torch.randperm(4, generator=torch.Generator().manual_seed(0), device=OTHER)


def gathering_by_cpu_indices():
    net()(pictures()).gather(1, torch.zeros(2, 1, dtype=torch.long))


def scattering_by_cpu_indices():
    torch.zeros(2, 3, device=OTHER).scatter_(1, torch.zeros(2, 1, dtype=torch.long), 1.0)


def indexing_the_cpu():
    return torch.arange(1000.0)[labels()]


def words_left_on_the_cpu():
    nn.Embedding(10, 4).to(OTHER)(torch.arange(3))


def a_model_left_behind():
    Net()(pictures())


def a_sum_on_the_cpu():
    total = torch.zeros(3)
    total += pictures().mean((0, 2, 3))


def a_running_mean_on_the_cpu():
    model = Net()
    average = Ema(model, 0.9)
    average.update(model.to(OTHER))


def a_kept_batch():
    kept = pictures().cpu()
    ((net()(pictures()) - net()(kept)) ** 2).mean()


def a_state_loaded_to_the_cpu():
    file = io.BytesIO()
    torch.save({"mean": pictures().mean(0)}, file)
    file.seek(0)
    return pictures() - torch.load(file, map_location="cpu", weights_only=True)["mean"]


def a_filled_mask():
    pictures().masked_fill(torch.zeros(8, 8, dtype=torch.bool), 0.0)


def values_of_the_cpu():
    x = pictures()
    x[x > 0.5] = torch.rand(int((x > 0.5).sum()))


def matrix_of_the_cpu():
    return net()(pictures()) @ torch.eye(3)


LEAKS = [
    unregistered_buffer, mask_on_the_cpu, activations_stored_mixed, loss_weights_on_the_cpu, adding_a_cpu_tensor,
    stacking_scalars, concatenating, tensor_without_a_device, numpy_at_once, array_at_once, generator_of_the_cpu,
    generator_of_the_cpu_for_an_order, gathering_by_cpu_indices,
    scattering_by_cpu_indices, indexing_the_cpu, words_left_on_the_cpu, a_model_left_behind, a_sum_on_the_cpu,
    a_running_mean_on_the_cpu, a_kept_batch, a_state_loaded_to_the_cpu, a_filled_mask, values_of_the_cpu,
    matrix_of_the_cpu,
]  # fmt: skip
BY_NUMPY = (numpy_at_once, array_at_once)


@inside
@pytest.mark.parametrize("leak", LEAKS, ids=lambda leak: leak.__name__)
def test_planted_leak_is_found(leak):
    """Every one of them works where there is only a CPU, and raises what CUDA raises here."""
    with pytest.raises(TypeError if leak in BY_NUMPY else MixedDevices, match=r"device"):
        leak()


@inside
@pytest.mark.parametrize("leak", [k for k in LEAKS if "generator" not in k.__name__], ids=lambda leak: leak.__name__)
def test_planted_leaks_work_on_the_cpu(leak, monkeypatch):
    """So nothing but the device can be what the other test finds."""
    monkeypatch.setitem(globals(), "OTHER", torch.device("cpu"))
    leak()


# Controls ----------------------------------------------------------------------------------------------------


@inside
def test_factories_make_tensors_of_the_device():
    makers = [
        torch.zeros(2, 3, device=OTHER), torch.ones(2, device="cuda:0"), torch.empty(2, device=OTHER),
        torch.full((2,), 3.0, device=OTHER), torch.arange(3, device=OTHER), torch.linspace(0, 1, 3, device=OTHER),
        torch.eye(2, device=OTHER), torch.tensor([1.0, 2.0], device=OTHER), torch.as_tensor([1], device=OTHER),
        torch.rand(2, device=OTHER), torch.randint(3, (2,), device=OTHER), torch.randperm(3, device=OTHER),
        torch.zeros_like(torch.ones(2), device=OTHER), torch.ones(2).to(OTHER),
        torch.ones(2).to(torch.ones(1, device=OTHER)), torch.ones(1, device=OTHER).new_tensor([1.0]),
        torch.zeros_like(torch.ones(2, device=OTHER)), torch.ones(1, device=OTHER).new_zeros(2),
    ]  # fmt: skip
    for made in makers:
        assert isinstance(made, OtherTensor) and made.device == OTHER and made.is_cuda
        assert made.cpu().device.type == "cpu" and not isinstance(made.cpu(), OtherTensor)
    assert torch.arange(3, device=OTHER).tolist() == [0, 1, 2] and torch.eye(2, device=OTHER).cpu().sum() == 2
    assert torch.tensor([1.0, 2.0], device=OTHER).cpu().numpy().tolist() == [1.0, 2.0]
    with torch.device(OTHER):
        assert torch.ones(2).device == OTHER


@inside
def test_what_cuda_mixes_is_mixed():
    x = pictures()
    two, where = torch.tensor(2.0), torch.tensor([1, 0])
    assert torch.equal((x * two).cpu(), x.cpu() * 2) and (x * two).device == OTHER
    assert (two * x).device == OTHER and torch.where(x > 0.5, x, torch.tensor(0.0)).device == OTHER
    assert torch.equal(x[where].cpu(), x.cpu()[where]) and x[where].device == OTHER
    x[where] = x.flip(0)
    x[0] = torch.zeros(3, 8, 8)
    assert float(x[0].sum()) == 0
    kept = torch.zeros_like(x, device="cpu")
    kept.copy_(x)
    assert torch.equal(kept, x.cpu()) and isinstance(x.mean().item(), float) and len(x.mean((1, 2, 3)).tolist()) == 2
    assert float(x.clamp(max=torch.tensor(0.5)).amax()) <= 0.5


@inside
def test_generators_belong_to_a_device():
    def drawn():
        g = torch.Generator(device=OTHER).manual_seed(3)
        return torch.randn(4, generator=g, device=OTHER), torch.randperm(5, generator=g, device=OTHER)

    (a, order), (b, again) = drawn(), drawn()
    assert a.device == OTHER and torch.equal(a, b) and torch.equal(order, again)
    assert isinstance(torch.Generator(), torch.Generator) and torch.Generator(OTHER).device == OTHER


def trained(device, precision=torch.float32, **options):
    """Weights after a few steps, and the losses."""
    model = Net()
    optimiser = torch.optim.AdamW(model.parameters(), 0.01, **options)  # before the model moves, as the engine does
    model = model.to(device)
    x, y, losses = pictures(4).to(device), labels(4).to(device), []
    for _ in range(4):
        with torch.autocast(device.type, precision, enabled=precision != torch.float32):
            loss = F.cross_entropy(model(x), y, weight=model.weights)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        losses.append(float(loss.detach()))
    return {k: v.detach().cpu() for k, v in model.state_dict().items()}, losses


@inside
@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}, {"foreach": False}], ids=str)
def test_training_gives_the_same_numbers_on_both_devices(options):
    here, losses = trained(torch.device("cpu"), **options)
    there, again = trained(OTHER, **options)
    assert losses == pytest.approx(again, abs=1e-5) and losses[-1] < losses[0]
    assert all(torch.allclose(v, there[k], atol=1e-5) for k, v in here.items())


@inside
def test_modules_keep_their_parameters_when_they_move():
    model = Net()
    weight = model.conv.weight
    model.to(OTHER)
    assert model.conv.weight is weight and weight.device == OTHER and isinstance(weight, nn.Parameter)
    assert {v.device for v in model.state_dict().values()} == {OTHER} and model.scale.device.type == "cpu"
    assert model.to(torch.float16).conv.weight.dtype == torch.float16 and weight.inner.dtype == torch.float16
    twin = copy.deepcopy(model)
    assert twin.conv.weight is not weight and isinstance(twin.conv.weight, nn.Parameter)
    assert len(list(twin.parameters())) == len(list(model.parameters())) and twin.conv.weight.device == OTHER
    model.to("cpu")
    assert not isinstance(model.conv.weight, OtherTensor) and isinstance(model.conv.weight, nn.Parameter)
    model.load_state_dict(twin.state_dict())  # copies across
    assert torch.equal(model.conv.weight, twin.conv.weight.cpu())


@inside
def test_attention_and_recurrence_run():
    x = torch.rand(2, 5, 8, device=OTHER)
    attention = nn.MultiheadAttention(8, 2, batch_first=True).to(OTHER)
    assert attention(x, x, x, need_weights=False)[0].device == OTHER
    q = x.view(2, 1, 5, 8).requires_grad_()
    F.scaled_dot_product_attention(q, q, q).sum().backward()
    assert q.grad.device == OTHER
    recurrent = nn.GRU(8, 4, batch_first=True).to(OTHER)
    packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([5, 3]), batch_first=True)
    out, _ = nn.utils.rnn.pad_packed_sequence(recurrent(packed)[0], batch_first=True)
    assert out.device == OTHER and out.shape == (2, 5, 4)
    with pytest.raises(MixedDevices, match="CPU int64"):
        nn.utils.rnn.pack_padded_sequence(x, torch.tensor([5, 3], device=OTHER), batch_first=True)


@inside
def test_inference_mode_finds_leaks_too():
    with torch.inference_mode():
        assert net()(pictures()).device == OTHER
        for leak in (adding_a_cpu_tensor, matrix_of_the_cpu, indexing_the_cpu):
            with pytest.raises(MixedDevices):
                leak()


@inside
def test_saved_tensors_return_to_their_device_and_safetensors_to_the_cpu():
    model, file = net(), io.BytesIO()
    torch.save(model.state_dict(), file)
    for place, type_ in ((None, "cuda"), (OTHER, "cuda"), ("cpu", "cpu")):
        file.seek(0)
        state = torch.load(file, map_location=place, weights_only=True)
        assert {v.device.type for v in state.values()} == {type_}
        assert torch.equal(state["conv.weight"].cpu(), model.conv.weight.detach().cpu())
    state = load(save({k: v.contiguous() for k, v in model.state_dict().items()}))
    assert {v.device.type for v in state.values()} == {"cpu"}


@dataclass(frozen=True)
class Batch:
    x: torch.Tensor


@inside
def test_accelerate_moves_models_and_batches():
    from accelerate import Accelerator

    accelerator = Accelerator()
    assert accelerator.device == OTHER
    model, _ = accelerator.prepare(Net(), torch.optim.SGD(Net().parameters()))
    assert next(model.parameters()).device == OTHER


@inside
def test_backward_raises_what_a_hook_mixed():
    """The backward pass of the device runs in a thread of its own; errors come back."""
    x = torch.ones(3, device=OTHER, requires_grad=True)
    x.register_hook(lambda grad: grad + torch.ones(3))
    with pytest.raises(MixedDevices):
        (x * 2).sum().backward()


def test_after_the_context_there_is_no_second_device():
    with other_device():
        torch.zeros(2, device=OTHER)
    assert torch.Generator is GENERATOR and "ACCELERATE_TORCH_DEVICE" not in os.environ
    with pytest.raises((NotImplementedError, AssertionError)):
        torch.zeros(2, device=OTHER)
