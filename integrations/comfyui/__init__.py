"""GuardPaint for ComfyUI: put this folder into custom_nodes/, with guardpaint installed in ComfyUI's environment.

GuardPaint Guard takes MODEL and VAE and gives a guarded MODEL to the sampler; GuardPaint Release takes what VAE Decode
made and lets through what passes the final verdict. Use both: without Release nobody looks at the finished picture.
"""

from __future__ import annotations

import hashlib
import json
from functools import lru_cache
from pathlib import Path

from comfy_api.latest import ComfyExtension, io
from typing_extensions import override

from guardpaint import GuardPaint
from guardpaint.doors.comfy import guarded

Account = io.Custom("GUARDPAINT_SESSION")


@lru_cache(maxsize=2)
def load(checkpoint: str, policy: str, stamp: str) -> GuardPaint:
    return GuardPaint.from_pretrained(checkpoint, policy=policy or None)


def stamp(policy: str) -> str:
    """SHA-256 of the policy file, so that an edited policy is loaded again."""
    return hashlib.sha256(Path(policy).read_bytes()).hexdigest() if policy else ""


class GuardPaintGuard(io.ComfyNode):
    """Audits and repairs while the picture is being made."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="GuardPaintGuard",
            display_name="GuardPaint Guard",
            category="guardpaint",
            description="Finds unsafe regions in the unfinished picture and repairs them.",
            inputs=[
                io.Model.Input("model"),
                io.Vae.Input("vae"),
                io.String.Input("prompt", multiline=True, tooltip="The positive prompt's text; repairs must fit it."),
                io.String.Input("guard", tooltip="Guard checkpoint: a directory or hub:owner/name."),
                io.String.Input("policy", default="", tooltip="Policy file; empty: the checkpoint's own."),
                io.Int.Input("seed", default=0, min=0, max=2**63 - 1),
            ],
            outputs=[io.Model.Output(), Account.Output(display_name="session")],
        )

    @classmethod
    def fingerprint_inputs(cls, policy: str = "", **inputs) -> str:
        return stamp(policy)

    @classmethod
    def execute(cls, model, vae, prompt: str, guard: str, policy: str, seed: int) -> io.NodeOutput:
        return io.NodeOutput(*guarded(model, vae, load(guard, policy, stamp(policy)), prompt, seed))


class GuardPaintRelease(io.ComfyNode):
    """Makes the final verdict; a picture that does not pass is repaired once more, blurred or withheld."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="GuardPaintRelease",
            display_name="GuardPaint Release",
            category="guardpaint",
            inputs=[io.Image.Input("images"), Account.Input("session")],
            outputs=[io.Image.Output(), io.String.Output(display_name="report")],
        )

    @classmethod
    def execute(cls, images, session) -> io.NodeOutput:
        shown, reports = session.release(images)
        return io.NodeOutput(shown, json.dumps([r.to_dict() for r in reports], ensure_ascii=False))


class GuardPaintExtension(ComfyExtension):
    @override
    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return [GuardPaintGuard, GuardPaintRelease]


async def comfy_entrypoint() -> GuardPaintExtension:
    return GuardPaintExtension()
