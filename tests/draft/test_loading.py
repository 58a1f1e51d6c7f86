"""Opening base models: precision, place, files, LoRAs; and clear errors where a folder or the machine cannot do it."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import bright_guard
from torch import nn

from guardpaint.bases import BaseOptions, load_base
from guardpaint.draft import loading
from guardpaint.draft.loading import LORA, chosen_device, chosen_dtype, load_pipeline
from guardpaint.draft.options import LoadOptions, Lora
from guardpaint.errors import BadCheckpoint, BadConfig, BadInput, GuardPaintError
from guardpaint.store.folders import Access
from guardpaint.testing import small


def opening(**load):
    return BaseOptions(LoadOptions(**load))


def dtypes(pipe):
    return {p.dtype for m in pipe.components.values() if isinstance(m, nn.Module) for p in m.parameters()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small Stable Diffusion, as the hub holds one."""
    path = tmp_path_factory.mktemp("hub") / "sd"
    small.pipeline("sd").save_pretrained(path)
    return path


@pytest.fixture
def copy(folder, tmp_path):
    """The same, to be damaged."""
    import shutil

    return Path(shutil.copytree(folder, tmp_path / "sd"))


# Options -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "fp8"}, "dtype 'fp8': choose fp32, fp16, bf16"),
        ({"offload": "all"}, "offload 'all': choose none, model, sequential"),
        ({"device": "my gpu"}, "device 'my gpu': write cpu, cuda"),
        ({"variant": "../x"}, "variant '../x': write a name such as fp16"),
        ({"revision": "a b"}, "revision 'a b': write a branch"),
        ({"token": " "}, "token: it is empty"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(BadConfig, match=message):
        LoadOptions(**options)


def test_loras_are_read_with_their_scale(tmp_path):
    odd = tmp_path / "a=0.5"
    odd.mkdir()
    assert Lora.parse("style") == Lora("style") and Lora.parse("style=0.8") == Lora("style", 0.8)
    assert Lora.parse(str(odd)) == Lora(str(odd)) and Lora.parse(f"{odd}=-2") == Lora(str(odd), -2.0)
    for bad in ("style=much", "style=nan", "=0.5"):
        with pytest.raises(BadConfig, match="write PATH or PATH=SCALE"):
            Lora.parse(bad)


def test_the_token_is_never_shown():
    options = opening(token="hf_secret")
    assert "hf_secret" not in repr(options) + repr(options.load.access)
    assert options.load.access.more() == {"token": "hf_secret"}


# Where and in which precision ----------------------------------------------------------------------------------


@pytest.fixture
def machine(monkeypatch):
    """Set what torch finds: a kind of accelerator, how many, and whether it has bf16."""

    def found(kind=None, count=1, bf16=True):
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: kind is not None)
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device(kind))
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: kind == "cuda")
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: bf16)
        monkeypatch.setattr(torch.cuda, "device", lambda device: __import__("contextlib").nullcontext())

    return found


def placed(**options):
    device = chosen_device(LoadOptions(**options))
    return str(device), chosen_dtype(LoadOptions(**options), device)


def test_the_machine_decides_what_is_not_given(machine):
    machine("cuda")
    assert placed() == ("cuda", torch.bfloat16)
    assert placed(offload="model") == ("cuda", torch.bfloat16)
    assert placed(dtype="fp32") == ("cuda", torch.float32) and placed(device="cpu") == ("cpu", torch.float32)
    machine("cuda", bf16=False)
    assert placed() == ("cuda", torch.float16) and placed(device="cuda:0")[1] == torch.float16
    machine("mps")
    assert placed() == ("cpu", torch.float32) and placed(device="mps") == ("mps", torch.float32)
    machine()
    assert placed() == ("cpu", torch.float32) and placed(dtype="fp16") == ("cpu", torch.float16)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (None, {"device": "cuda"}, "device 'cuda': torch finds none on this machine; it has cpu$"),
        ("cuda", {"device": "cuda:3"}, "device 'cuda:3': this machine has cuda:0 to cuda:1"),
        ("cuda", {"device": "mps"}, "device 'mps': torch finds none on this machine; it has cpu, cuda"),
        ("cuda", {"device": "gpu"}, "device 'gpu': torch knows no such one; this machine has cpu, cuda"),
        (None, {"offload": "model"}, "offload 'model': needs an accelerator.*--offload none"),
        ("cuda", {"offload": "sequential", "device": "cpu"}, "offload 'sequential': needs an accelerator"),
    ],
)
def test_what_the_machine_has_not_is_named(machine, folder, kind, options, message):
    machine(kind, count=2)
    with pytest.raises(BadConfig, match=message):
        load_base(str(folder), opening(**options))


def test_installed_bases_stay_as_they_are_unless_options_say_otherwise(machine):
    assert dtypes(load_base("tiny-flux", opening(dtype="bf16")).pipe) == {torch.bfloat16}
    machine("cuda")  # moving there would fail
    base = load_base("tiny-sd")
    assert dtypes(base.pipe) == {torch.float32} and base.pipe.device.type == "cpu"
    for what in ("variant", "revision"):
        with pytest.raises(BadConfig, match=f"{what} 'fp16': tiny-sd comes with a package.*leave --{what} out"):
            load_base("tiny-sd", opening(**{what: "fp16"}))


def test_an_offloaded_base_draws_under_guard(folder, monkeypatch):
    """The real hooks of accelerate; the accelerator is the CPU."""
    monkeypatch.setattr(loading, "chosen_device", lambda options: torch.device("cpu"))
    base = load_base(str(folder), BaseOptions(LoadOptions("fp32", offload="model"), steps=2))
    assert hasattr(base.pipe.unet, "_hf_hook")
    out = bright_guard().attach(base.pipe)("a cup", generator=torch.Generator().manual_seed(0), **base.call)
    assert out.safety[0].steps and not out.safety[0].errors
    assert base.digest() == load_base(str(folder), BaseOptions(steps=2)).digest()


def test_sequential_offload_leaves_no_weights_to_hash(folder, monkeypatch):
    monkeypatch.setattr(loading, "chosen_device", lambda options: torch.device("cpu"))
    base = load_base(str(folder), opening(offload="sequential"))
    assert all(p.is_meta for p in base.pipe.unet.parameters())
    with pytest.raises(BadInput, match="sequential offload hides its weights"):
        base.digest()


# Files -------------------------------------------------------------------------------------------------------


def test_variants(tmp_path):
    folder = tmp_path / "flux"
    pipe = small.pipeline("flux", seed=3)
    pipe.save_pretrained(folder, variant="fp16")
    with pytest.raises(BadInput, match="variant 'bf16' is not there \\(it has fp16\\)"):
        load_base(str(folder), opening(variant="bf16"))
    with pytest.raises(BadInput, match="no weights of this variant, but of fp16; see --variant"):
        load_base(str(folder))
    small.pipeline("flux", seed=4).save_pretrained(folder)
    weights = [load_base(str(folder), opening(variant=v)).pipe.transformer.state_dict() for v in ("fp16", None)]
    assert all(torch.equal(v, pipe.transformer.state_dict()[k]) for k, v in weights[0].items())
    assert not all(torch.equal(v, weights[1][k]) for k, v in weights[0].items()), "two sets of weights in one folder"
    for file in (folder / "vae").glob("*.fp16.safetensors"):
        file.unlink()
    load_base(str(folder), opening(variant="fp16"))  # what has no variant is read without one


def test_a_folder_without_variants_says_so(folder):
    with pytest.raises(BadInput, match="variant 'fp16' is not there \\(it has none; leave --variant out\\)"):
        load_base(str(folder), opening(variant="fp16"))


def test_a_folder_has_no_revisions(folder):
    with pytest.raises(BadInput, match="a folder has no revisions, so 'main' cannot be looked up"):
        load_base(str(folder), opening(revision="main"))


def test_models_in_several_files(tmp_path):
    folder = tmp_path / "sd"
    small.pipeline("sd").save_pretrained(folder, max_shard_size="40KB")
    assert len(list((folder / "unet").glob("*-of-*.safetensors"))) > 2
    load_pipeline(folder)
    next((folder / "unet").glob("*-00002-of-*")).unlink()
    with pytest.raises(BadCheckpoint, match="unet: file 2 of \\d+ is missing .* the download is incomplete"):
        load_pipeline(folder)


def cut(path):
    """Leave the first half of a file."""
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])


UNET = "unet/diffusion_pytorch_model.safetensors"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: cut(f / UNET), "less than its tensors take: the download is incomplete"),
        (lambda f: (f / UNET).write_bytes(b""), "0 bytes, which is less"),
        (lambda f: (f / UNET).write_bytes(b"\xff" * 64), "64 bytes, which is less"),
        (lambda f: (f / UNET).write_text("version https://git-lfs.github.com/spec/v1\n"), "run `git lfs pull`"),
        (lambda f: (f / UNET).unlink(), "unet: holds no safetensors: the download is incomplete"),
        (lambda f: (f / "unet/config.json").unlink(), "unet: config.json is missing"),
        (lambda f: (f / "tokenizer").rename(f / "x"), "names tokenizer, which is not there"),
        (lambda f: cut(f / "model_index.json"), "model_index.json: not valid JSON"),
        (lambda f: (f / "model_index.json").write_text("[]"), "not the index of a pipeline"),
        (lambda f: (f / "model_index.json").unlink(), "no model_index.json, so it is no diffusers pipeline"),
    ],
)
def test_half_a_download_says_what_is_missing(copy, damage, message):
    damage(copy)
    with pytest.raises(BadInput, match=f"{copy}.*{message}"):
        load_base(str(copy))


def test_a_single_file_checkpoint_is_told_from_a_pipeline(copy):
    (copy / UNET).rename(copy / "model.safetensors")
    (copy / "model_index.json").unlink()
    with pytest.raises(BadInput, match="a single-file checkpoint; save it once with diffusers' from_single_file"):
        load_base(str(copy))


def test_weights_of_another_shape_are_an_error(copy):
    config = json.loads((copy / "unet/config.json").read_text())
    (copy / "unet/config.json").write_text(json.dumps({**config, "cross_attention_dim": 48}))
    with pytest.raises(BadInput, match="cannot be loaded.*not a saved pipeline"):
        load_base(str(copy))


# The hub -----------------------------------------------------------------------------------------------------


@pytest.fixture
def hub(monkeypatch):
    """Downloads are answered by the test: a folder, or an error that is raised; returns what was asked for."""
    asked = []

    def answers(answer):
        def download(repo, revision, token=None, variant=None):
            asked.append((repo, revision, token, variant))
            if isinstance(answer, Exception):
                raise answer
            return answer

        monkeypatch.setattr(loading, "download", download)
        return asked

    return answers


def refused(kind, text="401"):
    """An error of the hub's own client."""
    from huggingface_hub import errors

    return getattr(errors, kind)(text, response=SimpleNamespace(headers={}, request=None))


def test_the_hub_is_asked_with_revision_token_and_variant(hub, tmp_path):
    small.pipeline("sd").save_pretrained(tmp_path, variant="fp16")
    asked = hub(tmp_path)
    options = opening(revision="v2", token="hf_secret", variant="fp16")
    assert load_base("owner/name", options).family == "sd"
    load_base("hub:owner/name@v3", opening(variant="fp16"))
    assert asked == [("owner/name", "v2", "hf_secret", "fp16"), ("owner/name", "v3", None, "fp16")]
    with pytest.raises(BadInput, match="names another revision than 'v2'"):
        load_base("hub:owner/name@v3", options)


@pytest.mark.parametrize(
    ("error", "options", "message"),
    [
        (refused("GatedRepoError"), {}, "hub:o/n: gated: accept its terms at .*/o/n, then give a token with --token"),
        (refused("GatedRepoError"), {"token": "hf_secret"}, "the account of this token has no access"),
        (refused("RepositoryNotFoundError"), {}, "not on the hub, or private.*give a token"),
        (refused("RevisionNotFoundError"), {"revision": "v9"}, "has no revision 'v9'"),
        (OSError("no route for hf_secret"), {"token": "hf_secret"}, "not to be had from the hub \\(no route for …"),
        (ValueError("no variant"), {}, "not to be had from the hub \\(no variant\\)"),
    ],
)
def test_what_the_hub_refuses_is_said_with_the_way_out(hub, error, options, message):
    hub(error)
    with pytest.raises(BadInput, match=message) as caught:
        load_base("o/n", opening(**options))
    assert "hf_secret" not in str(caught.value)


def test_a_gate_behind_another_error_is_found(hub):
    wrapped = OSError("Cannot load model o/n")
    wrapped.__cause__ = refused("GatedRepoError")
    hub(wrapped)
    with pytest.raises(BadInput, match="gated: accept its terms"):
        load_base("o/n")


def test_a_model_that_was_downloaded_before_opens_without_a_network(tmp_path, monkeypatch):
    """The hub's own client and its cache."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    commit, repo = "a" * 40, tmp_path / "models--o--n"
    small.pipeline("sd").save_pretrained(repo / "snapshots" / commit)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(commit)
    assert load_base("o/n").family == "sd"
    assert load_base("o/n", opening(revision=commit)).family == "sd"
    with pytest.raises(BadInput, match="hub:o/n: not to be had from the hub"):
        load_base("o/n", opening(revision="v9"))


def test_half_a_download_from_the_hub(hub, copy):
    cut(copy / UNET)
    hub(copy)
    with pytest.raises(BadInput, match="the download is incomplete; fetch the model again"):
        load_base("o/n")


def test_an_access_without_anything_asks_for_nothing():
    assert Access().more() == {} and Access("v1").more() == {}


# LoRAs -------------------------------------------------------------------------------------------------------


def lora(family, folder, seed=0):
    """A LoRA for the attention of a small base's denoiser, saved as diffusers does; returns its change of the weights."""
    from peft import LoraConfig, get_peft_model_state_dict

    pipe = small.pipeline(family)
    denoiser = pipe.unet if hasattr(pipe, "unet") else pipe.transformer
    kind = "unet" if hasattr(pipe, "unet") else "transformer"
    with small.seeded(seed):
        denoiser.add_adapter(LoraConfig(r=2, lora_alpha=2, init_lora_weights="gaussian", target_modules=["to_q"]))
        for name, weight in denoiser.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(weight)
    layers = get_peft_model_state_dict(denoiser)
    type(pipe).save_lora_weights(folder, **{f"{kind}_lora_layers": layers})
    pairs = [(k, k.replace("lora_A", "lora_B")) for k in layers if "lora_A" in k]
    return {a.partition(".lora_A")[0]: layers[b] @ layers[a] for a, b in pairs}


def denoiser_of(pipe):
    return (pipe.unet if hasattr(pipe, "unet") else pipe.transformer).state_dict()


@pytest.mark.parametrize("family", ["sd", "flux"])
def test_loras_are_merged_with_their_scales(family, tmp_path):
    first, second = lora(family, tmp_path / "a", seed=1), lora(family, tmp_path / "b", seed=2)
    plain = denoiser_of(small.pipeline(family))
    options = opening(loras=(Lora(str(tmp_path / "a"), 0.5), Lora(str(tmp_path / "b" / LORA))))
    merged = denoiser_of(load_base(f"tiny-{family}", options).pipe)
    assert merged.keys() == plain.keys() and first
    for key, value in merged.items():
        name = key.removesuffix(".weight")
        change = 0.5 * first[name] + second[name] if name in first else 0.0
        assert torch.allclose(value, plain[key] + change, atol=1e-5), key


def test_a_lora_changes_the_pictures_and_the_digest(folder, tmp_path):
    lora("sd", tmp_path)
    plain, styled = (
        load_base(str(folder), BaseOptions(LoadOptions(loras=r), steps=2)) for r in ((), (Lora(str(tmp_path)),))
    )
    assert plain.draw(["a cup"], [1])[0].tobytes() != styled.draw(["a cup"], [1])[0].tobytes()
    assert plain.digest() != styled.digest()


def test_loras_that_cannot_be_merged_are_errors(folder, tmp_path, hub):
    lora("flux", tmp_path / "flux")
    (tmp_path / "two").mkdir()
    for name in ("a", "b"):
        (tmp_path / "two" / f"{name}.safetensors").write_bytes((tmp_path / "flux" / LORA).read_bytes())
    (tmp_path / "old.bin").write_bytes(b"x")
    (tmp_path / "empty").mkdir()
    for path, message in (
        (tmp_path / "flux", "StableDiffusionPipeline"),
        (tmp_path / "two", "name one safetensors file; the folder has a.safetensors, b.safetensors"),
        (tmp_path / "empty", "the folder has none"),
        (tmp_path / "old.bin", "only safetensors are loaded"),
        (tmp_path / "nowhere", "it does not exist"),
    ):
        with pytest.raises(GuardPaintError, match=f"LoRA .*{path.name}.*{message}"):
            load_base(str(folder), opening(loras=(Lora(str(path)),)))


def test_a_lora_from_the_hub_gets_the_token(tmp_path, monkeypatch):
    lora("sd", tmp_path)
    asked = []

    def snapshot(repo, revision, token=None):
        asked.append((repo, revision, token))
        return tmp_path

    monkeypatch.setattr(loading, "snapshot", snapshot)
    load_base("tiny-sd", opening(token="hf_secret", loras=(Lora("hub:o/style@v1"),)))
    assert asked == [("o/style", "v1", "hf_secret")]
