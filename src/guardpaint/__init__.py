"""GuardPaint: safety for text-to-image diffusion that repairs the picture while it is being made."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

_WHERE = {
    "GuardPaint": "guardpaint.guard",
    "GuardConfig": "guardpaint.config",
    "Policy": "guardpaint.policy",
    "GuardReport": "guardpaint.loop.report",
    "AuditLog": "guardpaint.loop.audit_log",
    "AuditorScorer": "guardpaint.audit.model",
    "AuditorConfig": "guardpaint.audit.model",
    "Inpainter": "guardpaint.repair.inpainter",
    "NativeRepairer": "guardpaint.repair.native",
    "PipelineRepairer": "guardpaint.repair.pipeline",
    "TournamentProposer": "guardpaint.repair.proposer",
    "GuardPaintError": "guardpaint.errors",
}
__all__ = [
    "AuditLog",
    "AuditorConfig",
    "AuditorScorer",
    "GuardConfig",
    "GuardPaint",
    "GuardPaintError",
    "GuardReport",
    "Inpainter",
    "NativeRepairer",
    "PipelineRepairer",
    "Policy",
    "TournamentProposer",
    "__version__",
]

if TYPE_CHECKING:
    from guardpaint.audit.model import AuditorConfig, AuditorScorer
    from guardpaint.config import GuardConfig
    from guardpaint.errors import GuardPaintError
    from guardpaint.guard import GuardPaint
    from guardpaint.loop.audit_log import AuditLog
    from guardpaint.loop.report import GuardReport
    from guardpaint.policy import Policy
    from guardpaint.repair.inpainter import Inpainter
    from guardpaint.repair.native import NativeRepairer
    from guardpaint.repair.pipeline import PipelineRepairer
    from guardpaint.repair.proposer import TournamentProposer


def __getattr__(name: str) -> Any:
    """Public names load on first use, so that `import guardpaint` stays light."""
    if name not in _WHERE:
        raise AttributeError(f"module 'guardpaint' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_WHERE[name]), name)
