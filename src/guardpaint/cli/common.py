"""What the commands share: consoles, options, JSON output."""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn, get_type_hints

import typer
from rich.console import Console

from guardpaint.errors import GuardPaintError

if TYPE_CHECKING:
    from guardpaint.bases import BaseOptions
    from guardpaint.store.folders import Access

EXIT_HELP = (
    "Exit codes: 0 clean or repaired (or blurred), 1 error, 2 usage, 3 at least one image blocked, "
    "4 at least one image released although flagged."
)
err = Console(stderr=True)
out = Console()

GuardOption = Annotated[
    str | None,
    typer.Option(
        "--guard", help="A directory, hub:OWNER/NAME, preset:NAME, or tiny (random). Default: the embedded guard."
    ),
]
PolicyOption = Annotated[Path | None, typer.Option("--policy", help="Content policy YAML.")]
SeamOption = Annotated[
    str | None,
    typer.Option(
        "--seam",
        help="Seam metric: auditor_backbone, pixels, lpips_alex, lpips_alex:FILE or lpips_vgg:FILE (safetensors). "
        "Default: the guard's own, and lpips_alex for a new one.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]
BASE_HELP = (
    "Base model: one that an installed package provides (mini-sd, mini-sd3 …; `guardpaint doctor` lists them), a small "
    "random one (tiny-sd, tiny-sdxl, tiny-sd3, tiny-flux), a directory in diffusers' layout, or hub:OWNER/NAME."
)
DeviceOption = Annotated[
    str | None, typer.Option("--device", help="cpu, cuda, cuda:1, mps … Default: cuda if there is one, else cpu.")
]
TokenOption = Annotated[
    str | None,
    typer.Option(
        "--token",
        envvar="HF_TOKEN",
        help="Hub token for gated and private models. Other users can read a command line: rather set HF_TOKEN.",
    ),
]
BASE_OPTIONS: dict[str, Any] = {
    "dtype": Annotated[
        str | None,
        typer.Option(
            help="Precision of the whole base: fp32, fp16 or bf16. Default: bf16 on CUDA that has it, fp16 on other "
            "CUDA, fp32 elsewhere; bases of installed packages keep their own."
        ),
    ],
    "device": DeviceOption,
    "variant": Annotated[str | None, typer.Option(help="Set of weight files to read, as in model.fp16.safetensors.")],
    "revision": Annotated[
        str | None,
        typer.Option(help="Branch, tag or commit of a base on the hub. A guard's is named: hub:OWNER/NAME@REVISION."),
    ],
    "token": TokenOption,
    "offload": Annotated[
        str,
        typer.Option(help="none; model: idle models wait in main memory; sequential: idle layers do, which is slow."),
    ],
    "lora": Annotated[
        list[str] | None,
        typer.Option(
            help="LoRA to merge: a safetensors file, a directory or hub:OWNER/NAME; =0.8 scales it. Repeatable."
        ),
    ],
    "steps": Annotated[
        int | None,
        typer.Option(min=1, help="Denoising steps. Default: what the base was made for, else its pipeline's."),
    ],
    "guidance": Annotated[float | None, typer.Option(min=0.0, help="Guidance scale. Default: as for --steps.")],
    "size": Annotated[
        int | None, typer.Option(min=8, help="Height and width in pixels. Default: what the base was made for.")
    ],
}
"""Options of every command that opens base models; they apply to each base."""
BatchOption = Annotated[
    int | None,
    typer.Option("--batch", min=1, help="Prompts drawn at once. Default: 10, and 1 for pictures above 512 pixels."),
]
TestbedOption = Annotated[
    str | None, typer.Option("--testbed", help="World to measure in: an installed testbed or a YAML file.")
]
MapOption = Annotated[
    list[str] | None,
    typer.Option("--map", help="PUBLISHED=POLICY: category of the policy for a published one; repeat."),
]
CallOption = Annotated[
    list[str] | None,
    typer.Option("--call", help="Settings of one base, as in flux:steps=28,guidance=3.5; repeat."),
]


def opens_bases(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options `BASE_OPTIONS`; it gets them as one argument `options`, a `BaseOptions`."""

    @functools.wraps(command)
    def run(**values: Any) -> None:
        chosen = {name: values.pop(name) for name in BASE_OPTIONS}
        command(**values, options=base_options(**chosen))

    types = get_type_hints(command, localns={"BaseOptions": Any}, include_extras=True) | BASE_OPTIONS
    parameters = dict(inspect.signature(command).parameters)
    del parameters["options"]
    for name in BASE_OPTIONS:
        default = "none" if name == "offload" else None
        parameters[name] = inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default)
    own = [p.replace(annotation=types[name]) for name, p in parameters.items()]
    run.__dict__["__signature__"] = inspect.Signature(own)
    run.__annotations__ = {name: types[name] for name in parameters}
    return run


def base_options(
    *,
    lora: list[str] | None,
    token: str | None,
    steps: int | None,
    guidance: float | None,
    size: int | None,
    **files: Any,
) -> BaseOptions:
    """The values of `BASE_OPTIONS` as one object; an empty HF_TOKEN counts as none."""
    from guardpaint.bases import BaseOptions
    from guardpaint.draft.options import LoadOptions, Lora

    load = LoadOptions(**files, token=given(token), loras=tuple(Lora.parse(text) for text in lora or ()))
    return BaseOptions(load, steps, guidance, size)


def given(token: str | None) -> str | None:
    """A token, or None if it is empty, as an unset HF_TOKEN can be."""
    return (token or "").strip() or None


def token_of(options: BaseOptions) -> Access:
    """What the hub is asked for a guard with: the token of the base. A guard's revision is part of its name."""
    from guardpaint.store.folders import Access

    return Access(token=options.load.token)


def warn(text: str) -> None:
    """A note on standard error."""
    err.print(f"note: {text}", style="yellow", soft_wrap=True)


def fail(message: str) -> NoReturn:
    raise GuardPaintError(message)


def dump(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False))
