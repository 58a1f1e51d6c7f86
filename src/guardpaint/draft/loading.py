"""Opening diffusers pipelines and what belongs to them: the one way that every command and every part takes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from guardpaint.draft.intact import check_intact
from guardpaint.draft.options import DTYPES, FP32, LoadOptions, Lora
from guardpaint.errors import BadCheckpoint, BadConfig
from guardpaint.store.folders import HUB, refuse_pickles, resolve, snapshot

M = TypeVar("M", bound=Any)
LORA = "pytorch_lora_weights.safetensors"
"""File of a LoRA that belongs to the pipeline in the same folder."""
TINY_DECODERS = {
    "sd": "madebyollin/taesd",
    "sdxl": "madebyollin/taesdxl",
    "sd3": "madebyollin/taesd3",
    "flux": "madebyollin/taef1",
}
"""The published tiny decoder of each family's latent space."""


def load_pipeline(name: str | Path, options: LoadOptions = FP32) -> Any:
    """A saved pipeline of any family, from a folder or the hub (`hub:owner/name`), ready to draw, progress bar off."""
    return open_folder(pipeline_folder(name, options), options)


def pipeline_folder(name: str | Path, options: LoadOptions = FP32) -> Path:
    """The folder of a pipeline; from the hub, only the files that the pipeline needs are downloaded."""
    return resolve(name, download, options.access)


def download(repo: str, revision: str | None, token: str | None = None, variant: str | None = None) -> Path:
    """The local copy of a pipeline on the hub: its components, without pickles and single-file copies."""
    from diffusers import DiffusionPipeline

    found = DiffusionPipeline.download(repo, revision=revision, token=token, variant=variant, use_safetensors=True)
    return Path(found)


def open_folder(folder: Path, options: LoadOptions = FP32) -> Any:
    """The pipeline of a folder. Raises BadCheckpoint if it cannot be read, BadConfig if the machine lacks something."""
    from diffusers import DiffusionPipeline

    device = chosen_device(options)
    dtype = chosen_dtype(options, device)
    empty: dict[str, Any] = dict.fromkeys(check_intact(folder, options.variant))
    try:
        with without_bars():
            pipe = DiffusionPipeline.from_pretrained(
                folder, dtype=dtype, variant=options.variant, use_safetensors=True, local_files_only=True, **empty
            )
    except (OSError, ValueError, KeyError, AttributeError, ImportError, RuntimeError, TypeError) as error:
        raise BadCheckpoint(f"{folder}: not a saved pipeline ({error})") from error
    pipe.set_progress_bar_config(disable=True)
    return settled(pipe, options, device, dtype)


def adapted(pipe: Any, options: LoadOptions) -> Any:
    """A pipeline that a package has loaded: its own precision and place, except for what the options name."""
    stays = options.device is None and options.offload == "none"
    device = None if stays else chosen_device(options)
    dtype = None if options.dtype is None else chosen_dtype(options, device)
    return settled(pipe, options, device, dtype)


def settled(pipe: Any, options: LoadOptions, device: Any = None, dtype: Any = None) -> Any:
    """The pipeline in one precision, with its LoRAs merged, where it will run; None leaves things as they are."""
    if dtype is not None:
        cast(pipe, dtype)
    if device is not None and options.offload == "none":
        pipe.to(device, silence_dtype_warnings=True)
    for lora in options.loras:
        merge(pipe, lora, options.token)
    if options.offload == "model":
        pipe.enable_model_cpu_offload(device=device)
    elif options.offload == "sequential":
        pipe.enable_sequential_cpu_offload(device=device)
    return pipe


def cast(pipe: Any, dtype: Any) -> None:
    """Bring every component that has another precision to this one: text encoders and denoiser are multiplied."""
    from torch import nn

    with without_warnings():  # of modules to be kept in fp32, of which these have none
        for module in pipe.components.values():
            if isinstance(module, nn.Module) and getattr(module, "dtype", None) != dtype:
                module.to(dtype)


# Where and in which precision ----------------------------------------------------------------------------------


def chosen_device(options: LoadOptions) -> Any:
    """The device that the options name, or else CUDA if there is any. Raises BadConfig if the machine has no such one.

    Offloading needs an accelerator: it moves weights between that and main memory.
    """
    import torch

    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    here = "cpu" if accelerator is None else f"cpu, {accelerator.type}"
    if options.device is None:
        moving = options.offload != "none"
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        device = accelerator if moving and accelerator is not None else device
    else:
        try:
            device = torch.device(options.device)
        except RuntimeError as error:
            raise BadConfig(f"device {options.device!r}: torch knows no such one; this machine has {here}") from error
        if device.type != "cpu" and (accelerator is None or device.type != accelerator.type):
            raise BadConfig(f"device {options.device!r}: torch finds none on this machine; it has {here}")
        if device.type != "cpu" and (device.index or 0) >= torch.accelerator.device_count():
            count = torch.accelerator.device_count()
            raise BadConfig(f"device {options.device!r}: this machine has {device.type}:0 to {device.type}:{count - 1}")
    if options.offload != "none" and device.type == "cpu":
        raise BadConfig(
            f"offload {options.offload!r}: needs an accelerator to move weights to, and this machine has {here}; "
            "use --offload none"
        )
    return device


def on_machine(model: M, options: LoadOptions = FP32) -> M:
    """A judge, metric or other model, moved to the device that the options name, or else to CUDA if there is any."""
    model.to(chosen_device(options))
    return model


def chosen_dtype(options: LoadOptions, device: Any) -> Any:
    """The precision that the options name, or else bf16 where CUDA has it, fp16 on other CUDA, and fp32 elsewhere."""
    import torch

    if options.dtype is not None:
        return getattr(torch, DTYPES[options.dtype])
    if device.type != "cuda":
        return torch.float32
    with torch.cuda.device(device):
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16


# Tiny decoders and LoRAs -----------------------------------------------------------------------------------------


def move(pipe: Any, device: Any) -> None:
    """Move a pipeline to a device, unless it is offloaded: then its hooks decide where its parts are."""
    if not any(hasattr(part, "_hf_hook") for part in pipe.components.values()):
        pipe.to(device)


def load_tiny(folder: Path) -> Any:
    """A saved tiny decoder (TAESD)."""
    from diffusers import AutoencoderTiny

    refuse_pickles(folder)
    return AutoencoderTiny.from_pretrained(folder, use_safetensors=True, local_files_only=True).eval()


def merge(pipe: Any, lora: Lora, token: str | None = None) -> None:
    """Merge a LoRA of the user's into the pipeline. Raises BadCheckpoint if it is none, or one for another model."""
    try:
        file = lora_file(lora.path, token)
        fuse(pipe, file.parent, file.name, lora.scale)
    except BadCheckpoint as error:
        raise BadCheckpoint(f"LoRA {error}") from error
    except Exception as error:  # what diffusers and peft make of keys and shapes that they did not expect
        raise BadCheckpoint(f"LoRA {lora.path}: does not fit {type(pipe).__name__} ({error})") from error


def lora_file(path: str, token: str | None = None) -> Path:
    """The safetensors file that the name of a LoRA means."""
    file = Path(path)
    if file.is_file() and not path.startswith(HUB):
        if file.suffix != ".safetensors":
            raise BadCheckpoint(f"{path}: only safetensors are loaded, because a pickle can run code")
        return file
    folder = resolve(path, lambda repo, revision: snapshot(repo, revision, token))
    files = [folder / LORA] if (folder / LORA).exists() else sorted(folder.glob("*.safetensors"))
    if len(files) != 1:
        have = ", ".join(f.name for f in files) or "none"
        raise BadCheckpoint(f"{path}: name one safetensors file; the folder has {have}")
    return files[0]


def fuse(pipe: Any, folder: Path, weight_name: str = LORA, scale: float = 1.0) -> None:
    """Merge the LoRA of a folder into a pipeline; it may be for the denoiser alone."""
    import torch

    with without_warnings():  # that there is nothing for the text encoders
        pipe.load_lora_weights(folder, weight_name=weight_name, use_safetensors=True, local_files_only=True)
    if not any(pipe.get_list_adapters().values()):
        raise BadCheckpoint(f"{folder / weight_name}: holds nothing for {type(pipe).__name__}")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the last bits of a matrix product depend on the number of threads; weights must not
    try:
        pipe.fuse_lora(lora_scale=scale)
    finally:
        torch.set_num_threads(threads)
    pipe.unload_lora_weights()


@contextmanager
def without_warnings() -> Iterator[None]:
    """Switch diffusers' warnings off inside a with block."""
    from diffusers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)


@contextmanager
def without_bars() -> Iterator[None]:
    """Switch the libraries' progress bars off inside a with block: small weights load in a blink."""
    from diffusers.utils import logging as diffusers_log
    from transformers.utils import logging as transformers_log

    shown = [log for log in (diffusers_log, transformers_log) if log.is_progress_bar_enabled()]
    for log in shown:
        log.disable_progress_bar()
    try:
        yield
    finally:
        for log in shown:
            log.enable_progress_bar()
