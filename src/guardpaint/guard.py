"""GuardPaint: composes auditor, repairer, proposer and content policy; loads, saves and attaches them."""

from __future__ import annotations

import threading
import uuid
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import yaml
from jaxtyping import Float
from torch import Tensor, nn

from guardpaint.config import GuardConfig
from guardpaint.doors.attach import attach
from guardpaint.doors.calls import finished_output
from guardpaint.doors.watch import WatchCallback, WatchOptions, watch
from guardpaint.draft.codec import ViewDecoder
from guardpaint.draft.families import FAMILIES, family_of
from guardpaint.draft.family import Family
from guardpaint.draft.loading import load_tiny
from guardpaint.draft.readouts import Readouts
from guardpaint.draft.views import PixelView
from guardpaint.errors import BadCheckpoint, BadConfig, BadInput
from guardpaint.loop.audit_log import RecordWriter
from guardpaint.loop.call import CallSetup, GuardedCall
from guardpaint.loop.release import release, unfinished_reports
from guardpaint.loop.report import GuardReport
from guardpaint.parts import presets
from guardpaint.parts.checks import check_categories, check_protocols, check_scores, other_gate
from guardpaint.parts.folder import early_exits, load_readouts, read_settings
from guardpaint.parts.kinds import SavedPart, kind_of, load_part, save_part
from guardpaint.parts.sharing import Hub, push
from guardpaint.policy import Finding, Policy
from guardpaint.repair.inpainter import Inpainter
from guardpaint.repair.knobs import FixedProposer, UniformProposer
from guardpaint.repair.native import NativeRepairer
from guardpaint.repair.ranker import Ranker
from guardpaint.store import plugins
from guardpaint.store.checkpoint import fingerprint, write_atomic, write_json
from guardpaint.store.folders import Access, Origin, resolve
from guardpaint.store.manifest import MANIFEST, ROLES, VERSION
from guardpaint.store.recent import Recent
from guardpaint.types import Approver, Audit, Auditor, JsonDict, Proposer, Repairer, SeamMetric
from guardpaint.verify.lpips import LpipsAlex
from guardpaint.verify.parts import Parts
from guardpaint.verify.seam import BackboneSeam, open_seam, own_seam
from guardpaint.verify.weak import WeakSetting, weak_settings

REMEMBERED, KEPT_BYTES = 256, 2**28
"""Of how many requests the reports are kept, and how many bytes their pictures may take."""
FITTING = "give the guard one that fits (decoders=…), or none (decoders={})"
WITHOUT_WEIGHTS = (NativeRepairer, UniformProposer, FixedProposer)


class ThreadCalls(threading.local):
    """The latest reports and the current calls of each thread."""

    latest: list[GuardReport] | None = None
    watched: GuardedCall | None = None
    running: GuardedCall | None = None


class GuardPaint:
    """A safety layer for diffusers pipelines.

    guard = GuardPaint.from_pretrained(path_or_repo)
    pipe = guard.attach(pipe)
    out = pipe("…"); out.images; out.safety[0]
    """

    def __init__(  # noqa: PLR0913 (one keyword for each component)
        self,
        auditor: Auditor,
        repairer: Repairer,
        proposer: Proposer | None = None,
        *,
        approver: Approver | None = None,
        policy: Policy | None = None,
        config: GuardConfig | None = None,
        seam: SeamMetric | None = None,
        ranker: Ranker | None = None,
        decoders: dict[str, Any] | None = None,
        readouts: Mapping[str, Readouts] | None = None,
        audit_log: RecordWriter | None = None,
    ) -> None:
        check_protocols(auditor, repairer, approver)
        policy = policy or Policy.default()
        check_categories(auditor, approver, policy)
        config = config or GuardConfig()
        if config.keep and ranker is None:
            raise BadConfig(f"keep={config.keep}: leaving candidates out needs a ranker; pass one, or set keep=0")
        proposer = proposer or UniformProposer()
        check_scores(auditor, proposer, ranker)
        seam = LpipsAlex.load() if seam is None else seam
        self.parts = Parts(auditor, repairer, proposer, seam, policy, config, ranker, approver)
        unknown = sorted(set(decoders or {}) - {f.name for f in FAMILIES})
        if unknown:
            raise BadConfig(
                f"decoders for {', '.join(unknown)}: the families are {', '.join(f.name for f in FAMILIES)}"
            )
        self.decoders = {
            name: decoder.to(memory_format=torch.channels_last) for name, decoder in (decoders or {}).items()
        }
        self.exits = early_exits(self.decoders, readouts or {})
        """Early exits of the tiny decoders, by family."""
        self.origins: dict[str, Origin] = {}
        """The hub's models that parts of a preset were loaded from, by what they are used for."""
        self.audit_log = audit_log
        self._reports: Recent[list[GuardReport]] = Recent(REMEMBERED, KEPT_BYTES)
        self._lock = threading.Lock()
        self._thread = ThreadCalls()
        self._weights: dict[str, str] = {}

    @classmethod
    def compose(cls, *, auditor: Auditor, repairer: Repairer | None = None, **parts: Any) -> GuardPaint:
        """A guard of these parts, as `GuardPaint(…)` takes them; without a repairer the base repairs itself."""
        return cls(auditor, NativeRepairer() if repairer is None else repairer, **parts)

    @property
    def config(self) -> GuardConfig:
        return self.parts.config

    @property
    def policy(self) -> Policy:
        return self.parts.policy

    def configured(self, policy: Policy | None = None, **changes: Any) -> GuardPaint:
        """The same components under another configuration or policy."""
        other = GuardPaint(
            self.parts.auditor,
            self.parts.repairer,
            self.parts.proposer,
            approver=self.parts.approver,
            policy=policy or self.parts.policy,
            config=self.config.with_(**changes),
            seam=self.parts.seam,
            ranker=self.parts.ranker,
            decoders=self.decoders,
            audit_log=self.audit_log,
        )
        other.exits = self.exits  # fitted once for both
        other.origins = self.origins
        other.remember_requests(self._reports.most)
        return other

    # Doors -------------------------------------------------------------------------------------------------

    def attach(self, pipe: Any) -> Any:
        """A guarded twin; the pipeline you pass stays as it is. Supports SD 1.5, SDXL, SD 3/3.5, FLUX."""
        self.check_views(pipe)
        self.say_uncovered()
        return attach(self, pipe)

    @contextmanager
    def watch(
        self,
        pipe: Any,
        *,
        height: int | None = None,
        width: int | None = None,
        safety_prompt: str | Sequence[str] | None = None,
        seed: int | None = None,
        request_id: str | None = None,
    ) -> Iterator[WatchCallback]:
        """Guard one call of your own object; pass the callback on and close with `finish(out)`."""
        self.check_views(pipe)
        self.say_uncovered(stacklevel=4)  # past the context manager
        options = WatchOptions(height, width, safety_prompt, seed, request_id)
        with watch(self, pipe, options) as callback:
            self._thread.watched = callback.call
            yield callback
        unfinished = callback.reports()
        self.remember(unfinished)
        if self.audit_log is not None:
            self.audit_log.append([r.to_dict() for r in unfinished])

    def finish(self, out: Any, output_type: str = "pil") -> Any:
        """Final verdict for the latest watched call of this thread; returns the output, guarded."""
        call = self._thread.watched
        if call is None:
            raise BadInput("guard.finish(out) closes a `with guard.watch(pipe) as cb:` call; there was none")
        self._thread.watched = None
        images = out[0] if isinstance(out, tuple) else out.images
        if isinstance(images, torch.Tensor):
            output_type = "latent" if output_type == "latent" else "pt"
        elif not isinstance(images, list):
            output_type = "np"
        return self.release(call, out, output_type)

    def release(self, call: GuardedCall, out: Any, output_type: str) -> Any:
        """Make the final verdicts and store the reports; returns the output with the images that may be shown."""
        images = out[0] if isinstance(out, tuple) else out.images
        released, reports = release(call, images, output_type)
        self.remember(reports)
        return finished_output(out, released, reports)

    def open(
        self,
        pipe: Any,
        *,
        door: str,
        prompts: list[str] | None,
        seeds: Callable[[int, int], tuple[int, int]],
        request_id: str | None = None,
        **more: Any,
    ) -> GuardedCall:
        """A listener for one guarded call; `more` are further fields of `CallSetup`."""
        family = family_of(pipe)
        setup = CallSetup(
            parts=self.parts,
            pipe=pipe,
            vae=pipe.vae,
            family=family,
            request_id=request_id or uuid.uuid4().hex,
            seeds=seeds,
            door=door,
            tiny=self.tiny_decoder(pipe, family),
            exits=self.exits.get(family.name),
            write_log=self.audit_log.append if self.audit_log is not None else None,
            weights=self.weight_hashes() if self.audit_log is not None else {},
            **more,
        )
        return GuardedCall(setup, prompts)

    def check_views(self, pipe: Any) -> None:
        """Raise BadConfig if the thresholds were calibrated on views of which the guard makes none on this pipeline."""
        calibration = self.config.calibration
        if calibration is None or not calibration.views:
            return
        family = family_of(pipe)
        tiny = None if self.config.view_decoder == "full" else self.tiny_decoder(pipe, family)
        exits = None if tiny is None else self.exits[family.name]
        decoder = ViewDecoder(tiny, pipe.vae, pipe.vae_scale_factor, pipe._execution_device, exits=exits)
        self.require_views(decoder.ways(), type(pipe).__name__)

    def require_views(self, ways: Collection[str], where: str) -> None:
        """Raise BadConfig if the thresholds were calibrated on none of these ways to make views."""
        calibration = self.config.calibration
        if calibration is None or not calibration.views or set(ways) & set(calibration.views):
            return
        raise BadConfig(
            f"the thresholds were calibrated on views by {', '.join(calibration.views)}; on {where} this guard makes "
            f"views by {', '.join(sorted(ways))}. Calibrate it on such views, with the same decoder and readouts"
        )

    def tiny_decoder(self, pipe: Any, family: Family) -> Any | None:
        """The family's tiny decoder if one is loaded and fits this pipeline's latents."""
        tiny = self.decoders.get(family.name)
        if tiny is None:
            return None
        have, need = tiny.config.latent_channels, pipe.vae.config.latent_channels
        if have != need:
            raise BadConfig(
                f"the tiny decoder for {family.name!r} takes {have} latent channels, the pipeline has {need}; {FITTING}"
            )
        grows, factor = 2 ** (len(tiny.config.decoder_block_out_channels) - 1), pipe.vae_scale_factor
        if grows != factor:
            raise BadConfig(
                f"the tiny decoder for {family.name!r} enlarges {grows}-fold, the pipeline's VAE {factor}-fold; "
                f"{FITTING}"
            )
        return tiny

    def say_uncovered(self, stacklevel: int = 3) -> None:
        """Warn of the categories that no part can tell, which the policy accepts, and of a scope that is weak."""
        if self.parts.uncovered:
            warnings.warn(f"no part of this guard can tell {', '.join(self.parts.uncovered)}", stacklevel=stacklevel)
        for weak in self.weak_settings():
            if weak.name == "scope":
                warnings.warn(str(weak), stacklevel=stacklevel)

    # Reports -----------------------------------------------------------------------------------------------

    def remember(self, reports: list[GuardReport]) -> None:
        if not reports:
            return
        with self._lock:
            self._reports.put(reports[0].request_id, reports, sum(r.evidence_bytes for r in reports))
        self._thread.latest = reports

    def reports(self, request_id: str | None = None) -> list[GuardReport]:
        """Reports of a request (the latest 256 are kept, if their pictures take no more than 256 MB), or of this
        thread's latest one."""
        if request_id is None:
            return self._thread.latest or []
        with self._lock:
            found = self._reports.get(request_id)
        if found is None:
            raise BadInput(f"no request {request_id!r} among the latest {self._reports.most}")
        return found

    def remember_requests(self, most: int) -> None:
        """Keep the reports of so many requests, and at least those of the latest one; a service keeps its own."""
        with self._lock:
            self._reports = Recent(most, KEPT_BYTES)

    def running(self, call: GuardedCall | None) -> None:
        """Set the call that this thread is running."""
        self._thread.running = call

    def so_far(self) -> list[GuardReport]:
        """Unfinished reports of the call that this thread is running, for step callbacks; empty outside of a call."""
        call = self._thread.running
        return [] if call is None else unfinished_reports(call)

    # Audits of given images --------------------------------------------------------------------------------

    def audit_image(self, image: Float[Tensor, "3 h w"], prompt: str | None = None) -> Audit:
        """Score one finished picture at the fine size, in tiles if it is larger than the auditor learned."""
        view = PixelView(image)

        def look(images: Float[Tensor, "b 3 h w"]) -> list[Audit]:
            return self.parts.audit(images, [prompt] * len(images), 0.0)

        large = self.parts.coarser(view.size)
        for note in [*self.parts.uncalibrated(view.size), *([large] if large else [])]:
            warnings.warn(note, stacklevel=2)
        whole = look(view.at(self.parts.fine_size)[None])[0]
        return self.parts.with_tiles(whole, view.native, view.size, look)

    def finding(self, image: Float[Tensor, "3 h w"], audit: Audit, prompt: str | None = None) -> Finding | None:
        """Why a finished picture must not be released: the auditor's finding, or else the approver's."""
        found = self.parts.finding(audit, 1.0)
        if found is not None or self.parts.approver is None:
            return found
        return self.parts.approval(image, prompt, edited=False)[1]

    def weak_settings(self) -> list[WeakSetting]:
        """The settings of this guard that open a door, each with what it lets through; empty for a sound guard."""
        return weak_settings(self.policy, self.config)

    def weight_hashes(self) -> dict[str, str]:
        """SHA-256 of the weights of each component that is used; computed once."""
        if not self._weights:
            for name in ("auditor", "approver", "proposer", "repairer", *(("ranker",) if self.config.keep else ())):
                part = getattr(self.parts, name)
                if isinstance(part, nn.Module):
                    self._weights[name] = fingerprint(part)
                elif isinstance(part, Inpainter):
                    self._weights[name] = fingerprint(part.pipe.unet)  # the hash that earlier logs name
                elif isinstance(part, SavedPart) and not isinstance(part, WITHOUT_WEIGHTS):
                    self._weights[name] = part.digest()
        return self._weights

    def to(self, device: str | torch.device) -> GuardPaint:
        """Move every part that has weights: modules, and whatever else has a method `to(device)`."""
        parts = [getattr(self.parts, name, None) for name in ROLES]
        for part in (*parts, *self.decoders.values()):
            move = getattr(part, "to", None)
            if move is not None:
                move(device)
        return self

    # Saving and loading ------------------------------------------------------------------------------------

    def save_pretrained(self, directory: str | Path, dtype: torch.dtype | None = None) -> None:
        """Write guardpaint.json, policy.yaml and one folder per component; guardpaint.json is written last."""
        directory = Path(directory)
        parts = self.chosen_parts()
        for role, part in parts.items():
            kind_of(role, part)  # before anything is written
        entries = {role: save_part(role, part, directory, dtype).to_dict() for role, part in parts.items()}
        for name, decoder in self.decoders.items():
            decoder.save_pretrained(directory / "decoders" / name)
        for name, own in self.exits.items():
            if own.known is not None:
                own.known.save(directory / "decoders" / name)
        write_atomic(directory / "policy.yaml", yaml.safe_dump(self.policy.to_dict(), sort_keys=False).encode())
        manifest: JsonDict = {
            "version": VERSION,
            "config": self.config.to_dict(),
            "parts": entries,
            "decoders": sorted(self.decoders),
            "readouts": {name: own.known.identity for name, own in self.exits.items() if own.known is not None},
            "origins": {use: origin.to_dict() for use, origin in self.origins.items()},
        }
        write_json(directory / MANIFEST, manifest)

    def push_to_hub(
        self,
        repo: str,
        about: Mapping[str, Any],
        *,
        private: bool = True,
        revision: str | None = None,
        token: str | None = None,
        hub: Hub | None = None,
    ) -> str:
        """Upload this guard with a model card; returns the name by which `from_pretrained` loads it.

        `about` has `license`, and `metrics` (a number by name) if they are known.
        """
        if hub is None:
            from huggingface_hub import HfApi

            hub = HfApi(token=token)
        return push(self, repo, about, hub, private=private, revision=revision)

    def chosen_parts(self) -> dict[str, Any]:
        """The parts by role, without those that a guard has by itself."""
        found = {role: getattr(self.parts, role) for role in ROLES}
        seam = self.parts.seam
        if isinstance(seam, BackboneSeam) and seam.auditor is self.parts.auditor:
            del found["seam"]
        return {role: part for role, part in found.items() if part is not None}

    @classmethod
    def embedded(cls, **changes: Any) -> GuardPaint:
        """The default guard that an installed package provides (`paperdolls`); `changes` as in from_pretrained."""
        return cls.from_pretrained(plugins.load(plugins.GUARDS, "embedded", "the embedded guard")(), **changes)

    @classmethod
    def from_preset(
        cls,
        name: str,
        *,
        device: str | torch.device | None = None,
        policy: Policy | str | Path | None = None,
        token: str | None = None,
        seam: SeamMetric | str | None = None,
        decoders: dict[str, Any] | None = None,
        audit_log: RecordWriter | None = None,
        **changes: Any,
    ) -> GuardPaint:
        """A guard of public parts (`guardpaint presets` lists them); `changes` override its GuardConfig.

        `decoders` are tiny decoders by family in place of the preset's; {} for none.
        """
        chosen = presets.preset(name)
        if chosen.name in presets.EMBEDDED:
            if decoders is not None:
                raise BadConfig(f"preset {chosen.name} has decoders of its own, which cannot be replaced")
            folder = plugins.load(plugins.GUARDS, presets.EMBEDDED[chosen.name], f"the preset {chosen.name}")()
            guard = cls.from_pretrained(folder, policy=policy, seam=seam, audit_log=audit_log, **changes)
            return guard if device is None else guard.to(device)
        if not isinstance(policy, Policy):
            policy = presets.policy_of(chosen) if policy is None else Policy.load(policy)
        parts = presets.parts_of(chosen, policy, token)
        parts["seam"] = open_seam(seam, parts["auditor"]) if isinstance(seam, str) else seam
        config = GuardConfig.from_dict({**chosen.config, **changes})
        for weak in weak_settings(policy, config):
            warnings.warn(f"preset {chosen.name}: {weak}", stacklevel=2)
        origins = presets.origins_of(chosen, token, decoders is None)
        if decoders is None:
            decoders = presets.decoders_of(chosen, token)
        guard = cls(**parts, policy=policy, config=config, decoders=decoders, audit_log=audit_log)
        guard.origins = origins
        return guard if device is None else guard.to(device)

    @classmethod
    def from_pretrained(
        cls,
        path_or_repo: str | Path,
        *,
        policy: Policy | str | Path | None = None,
        seam: SeamMetric | str | None = None,
        audit_log: RecordWriter | None = None,
        revision: str | None = None,
        token: str | None = None,
        **changes: Any,
    ) -> GuardPaint:
        """Load a guard from a directory, from the hub as `hub:owner/name`, or a preset as `preset:name`.

        `revision` and `token` are the hub's. `changes` override its GuardConfig. `seam` replaces its seam metric: one,
        or a name as in `open_seam`; a guard whose manifest names none takes its auditor's backbone. Missing parts
        raise. Every setting that opens a door is warned of.
        """
        if str(path_or_repo).startswith(presets.PRESET):
            name = str(path_or_repo)
            if revision is not None:
                raise BadConfig(f"{name}: {presets.NO_REVISION} revision={revision!r}")
            return cls.from_preset(name, policy=policy, token=token, seam=seam, audit_log=audit_log, **changes)
        directory = resolve(path_or_repo, access=Access(revision, token))
        manifest, policy, config = read_settings(directory, policy, **changes)
        for weak in weak_settings(policy, config):
            warnings.warn(f"{directory}: {weak}", stacklevel=2)
        decoders = {}
        for name in manifest.decoders:
            try:
                decoders[name] = load_tiny(directory / "decoders" / name)
            except Exception as error:
                raise BadCheckpoint(f"{directory / 'decoders' / name}: {error}") from error
        readouts = load_readouts(directory / "decoders", decoders, manifest.readouts)
        parts = {role: load_part(role, entry, directory, token) for role, entry in manifest.parts.items()}
        auditor, calibration = parts["auditor"], config.calibration
        if calibration is not None and calibration.auditor not in ("", auditor.digest()):
            raise BadCheckpoint(f"{directory}: thresholds calibrated for another auditor; run `guardpaint calibrate`")
        if (other := other_gate(parts["proposer"], config)) is not None:
            warnings.warn(f"{directory}: {other}", stacklevel=2)
        if seam is not None or "seam" not in parts:
            parts["seam"] = open_seam(seam, auditor) if isinstance(seam, str) else seam or own_seam(auditor)
        guard = cls(**parts, policy=policy, config=config, decoders=decoders, readouts=readouts, audit_log=audit_log)
        guard.origins = manifest.origins
        return guard
