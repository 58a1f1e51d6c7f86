"""`guardpaint compose` makes a guard's folder from trained parts; `guardpaint push` uploads it with a card."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from guardpaint.cli.common import SeamOption, TokenOption, given


def compose(
    out_dir: Annotated[Path, typer.Option("--out", help="Folder for the guard.")],
    auditor: Annotated[Path, typer.Option(help="A trained auditor.")],
    repairer: Annotated[
        str,
        typer.Option(
            help="native, or any inpainting pipeline (SD, SDXL, SD 3, FLUX Fill): a folder or hub:OWNER/NAME."
        ),
    ],
    repairer_prompt: Annotated[
        str | None,
        typer.Option(
            help="safe: the policy's safe prompt; user: the user's own, from which a stock model repaints the harm. "
            "Default: user for a model that `guardpaint train` aligned, by its card.json; safe for any other."
        ),
    ] = None,
    proposer: Annotated[str, typer.Option(help="uniform, fixed, strong, or a trained proposer's folder.")] = "uniform",
    ranker: Annotated[Path | None, typer.Option(help="A trained ranker.")] = None,
    keep: Annotated[
        int, typer.Option(min=0, help="Candidates that the ranker keeps of a tournament; 0 keeps all.")
    ] = 0,
    approver: Annotated[
        Path | None, typer.Option(help="Another trained auditor, which looks at every finished picture once more.")
    ] = None,
    calibration: Annotated[
        Path | None,
        typer.Option(help="File of `guardpaint calibrate` for this auditor: the guard takes its thresholds."),
    ] = None,
    f_gate: Annotated[str, typer.Option(help="Gate of prompt faithfulness: absolute, relative or off.")] = "relative",
    decoder: Annotated[
        list[str] | None, typer.Option(help="FAMILY=DIR: tiny decoder for sd, sdxl, sd3 or flux; repeat.")
    ] = None,
    seam: SeamOption = None,
    policy: Annotated[Path | None, typer.Option(help="Content policy YAML; default: the embedded policy.")] = None,
    token: TokenOption = None,
) -> None:
    """Make a guard from trained parts and save it as a folder that `GuardPaint.from_pretrained` loads."""
    from guardpaint.audit.approvers import SecondLook
    from guardpaint.audit.model import AuditorScorer
    from guardpaint.cli.data import load_policy
    from guardpaint.config import GuardConfig
    from guardpaint.draft.loading import load_tiny
    from guardpaint.errors import BadInput
    from guardpaint.evaluate.auditor import read_calibration
    from guardpaint.guard import GuardPaint
    from guardpaint.repair.opening import open_repairer
    from guardpaint.repair.ranker import Ranker
    from guardpaint.train.rollouts import open_proposer
    from guardpaint.verify.seam import open_seam

    settings = {**GuardConfig().to_dict(), "keep": keep, "f_gate": f_gate}
    if calibration is not None:
        found = read_calibration(calibration)
        located = all(band.mask_level is not None for band in found.bands)
        settings |= {"calibration": found.to_dict(), "mask_threshold": "calibrated" if located else "percentile"}
    pairs = [d.partition("=")[::2] for d in decoder or ()]
    if not all(folder for _, folder in pairs):
        raise BadInput(f"--decoder {' '.join(decoder or ())}: write FAMILY=DIR, as in sd=models/taesd")
    scorer = AuditorScorer.from_pretrained(auditor)
    if calibration is not None and found.auditor not in ("", scorer.identity()):
        raise BadInput(
            f"{calibration}: calibrated for another auditor than {auditor}; run `guardpaint calibrate` again"
        )
    painter = open_repairer(repairer, repairer_prompt, given(token))
    guard = GuardPaint(
        scorer,
        painter,
        open_proposer(proposer),
        seam=None if seam is None else open_seam(seam, scorer),
        approver=None if approver is None else SecondLook(AuditorScorer.from_pretrained(approver)),
        policy=load_policy(policy),
        config=GuardConfig.from_dict(settings),
        ranker=None if ranker is None else Ranker.from_pretrained(ranker),
        decoders={family: load_tiny(Path(folder)) for family, folder in pairs},
    )
    guard.save_pretrained(out_dir)
    words = painter.options().get("prompt", "safe")
    made_of = f"{', '.join(guard.chosen_parts())}; policy {guard.policy.name}"
    typer.echo(f"{out_dir}: {made_of}; the repairer gets the {words} prompt")


def push(
    guard: Annotated[Path, typer.Argument(help="Folder of a guard.")],
    repository: Annotated[str, typer.Argument(help="OWNER/NAME on the hub.")],
    licence: Annotated[str, typer.Option("--license", help="Licence of the weights, as the card names it.")],
    public: Annotated[bool, typer.Option("--public", help="Create the repository public; default: private.")] = False,
    token: TokenOption = None,
) -> None:
    """Upload a guard to the hub with a model card that names its policy, parts and weak settings."""
    from guardpaint.guard import GuardPaint

    loaded = GuardPaint.from_pretrained(guard)
    typer.echo(loaded.push_to_hub(repository, {"license": licence}, private=not public, token=given(token)))
