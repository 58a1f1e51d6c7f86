"""Whether the parts of a guard fit each other and the policy, checked when it is composed."""

from __future__ import annotations

from typing import Any

from guardpaint.config import GuardConfig
from guardpaint.errors import BadConfig
from guardpaint.policy import Policy
from guardpaint.repair.proposer import TournamentProposer
from guardpaint.repair.ranker import Ranker
from guardpaint.types import SAFE, Approver, Auditor, Embeds, Proposer, Repairer

ROLES: dict[str, tuple[Any, tuple[str, ...]]] = {
    "auditor": (Auditor, ("categories", "absent", "sizes", "audit")),
    "repairer": (Repairer, ("name", "candidates")),
    "approver": (Approver, ("categories", "name", "approve")),
}
"""The protocol of each role, and what it asks for."""


def check_protocols(auditor: Any, repairer: Any, approver: Any = None) -> None:
    """Raise BadConfig if a part cannot play its role; it would only fail in the middle of a picture."""
    for role, part in (("auditor", auditor), ("repairer", repairer), ("approver", approver)):
        protocol, needs = ROLES[role]
        if role == "approver" and part is None:
            continue
        if isinstance(part, type):
            raise BadConfig(f"{role} {part.__name__}: is a class; pass an instance of it")
        if not isinstance(part, protocol):
            lacking = ", ".join(n for n in needs if not hasattr(part, n))
            raise BadConfig(f"{role} {type(part).__name__}: has no {lacking}; any {role} has {', '.join(needs)}")


def check_categories(auditor: Auditor, approver: Approver | None, policy: Policy) -> None:
    """Raise BadConfig if a part tells categories that the policy does not name, or none tells one that it names."""
    for who, part in (("auditor", auditor), ("approver", approver)):
        if part is None:
            continue
        unknown = [c for c in part.categories if c not in policy.names]
        if unknown or SAFE not in part.categories:
            raise BadConfig(
                f"the {who} knows {list(part.categories)} but policy {policy.name!r} names {list(policy.names)}; "
                "map its labels to the policy's categories, or use a policy with its own"
            )
    known = {*auditor.categories, *(() if approver is None else approver.categories)}
    blind = [c.name for c in policy.categories if c.name not in known and not c.uncovered]
    if blind:
        raise BadConfig(
            f"neither auditor nor approver can tell {', '.join(blind)}, which policy {policy.name!r} names; add a part "
            "that can, or write `uncovered: accepted` under the category in the policy file"
        )


def check_scores(auditor: Auditor, proposer: Proposer, ranker: Ranker | None) -> None:
    """Raise BadConfig if a trained part needs scores or embeddings that the auditor does not give."""
    unknown = sorted(auditor.absent - {"F", "P", "B"})
    if unknown:
        raise BadConfig(f"the auditor declares {', '.join(unknown)} absent; only F, P and B can be")
    if auditor.absent and ranker is not None:
        raise BadConfig(f"the ranker needs F, P and B; this auditor gives no {', '.join(sorted(auditor.absent))}")
    if isinstance(proposer, TournamentProposer):
        wanted = proposer.config.image_dim, proposer.config.text_dim
        has = auditor.embeds if isinstance(auditor, Embeds) else None
        if has != wanted:
            raise BadConfig(
                f"the learned proposer reads embeddings of lengths {wanted} (picture, prompt), "
                f"{type(auditor).__name__} gives {has or 'none'}; leave the proposer out, or train one with this "
                "auditor"
            )


def other_gate(proposer: Proposer, config: GuardConfig) -> str | None:
    """What to warn of if a trained proposer learned under other gates than the guard has; None if they agree.

    A checkpoint that does not name its gates is not compared.
    """
    trained = proposer.config.gate if isinstance(proposer, TournamentProposer) else None
    if trained is None or trained == config.gate:
        return None
    return (
        f"the proposer was trained under the gates {trained}, the guard has {config.gate}: it proposes what those let "
        "through; train it under the guard's own, or set them back"
    )
