"""What outlasts the process: the audit log, and the policy that operators changed over the API."""

from __future__ import annotations

import datetime
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from guardpaint.errors import BadConfig, NotKept
from guardpaint.loop.audit_log import AuditLog
from guardpaint.policy import Policy
from guardpaint.store.checkpoint import write_json
from guardpaint.types import JsonDict

CHOICES = ("keep", "discard")
"""What to do at the start with a changed policy that differs from the configured one."""


@dataclass(frozen=True)
class ChangedPolicy:
    """A policy that was changed over the API, as it is kept in a file."""

    policy: Policy
    instead_of: str
    """Digest of the configured policy that it replaced."""
    by: str
    at: str

    def to_dict(self) -> JsonDict:
        digest = self.policy.digest()
        return {"policy": self.policy.to_dict(), "sha256": digest, "instead_of": self.instead_of,
                "by": self.by, "at": self.at}  # fmt: skip

    @classmethod
    def from_dict(cls, data: Any) -> ChangedPolicy:
        policy = Policy.from_dict(data["policy"])
        if policy.digest() != data["sha256"]:
            raise ValueError("its hash is not that of its policy")
        return cls(policy, str(data["instead_of"]), str(data["by"]), str(data["at"]))


class PolicyFile:
    """The file that keeps a changed policy over a restart."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.configured = ""
        """Digest of the policy that the service was configured with."""

    def read(self) -> ChangedPolicy | None:
        """The changed policy, if there is one. A file that cannot be read raises BadConfig."""
        try:
            return ChangedPolicy.from_dict(json.loads(self.path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise BadConfig(
                f"{self.path}: the policy that was changed over the API cannot be read ({error!s:.200}). Restore the "
                "file, or move it away to go back to the configured policy"
            ) from error

    def write(self, policy: Policy, by: str) -> None:
        """Keep a policy; raises NotKept if the file cannot be written."""
        before = self.read()
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        self.put(ChangedPolicy(policy, before.instead_of if before else self.configured, by, now))

    def put(self, changed: ChangedPolicy | None) -> None:
        """Write the file, or remove it."""
        try:
            if changed is None:
                self.path.unlink(missing_ok=True)
            else:
                write_json(self.path, changed.to_dict())
        except OSError as error:
            raise NotKept(f"{self.path}: the policy could not be kept ({error.strerror})") from error

    def restore(self, configured: Policy, choice: str | None = None) -> ChangedPolicy | None:
        """The changed policy that counts at the start, if there is one.

        It counts as long as the service is configured with the policy that it replaced. If another one is configured
        since, somebody has to choose between the two.
        """
        self.configured = configured.digest()
        changed = self.read()
        if changed is None or self.configured in (changed.instead_of, changed.policy.digest()):
            return changed
        if choice == "keep":
            kept = ChangedPolicy(changed.policy, self.configured, changed.by, changed.at)
            self.put(kept)
            return kept
        if choice == "discard":
            self.path.rename(self.path.with_name(f"{self.path.stem}-discarded-{time.time_ns()}{self.path.suffix}"))
            return None
        raise BadConfig(
            f"two policies: {configured.name!r} is configured, but {changed.by} changed another one over the API at "
            f"{changed.at} ({self.path}). Start with --changed-policy keep to use the one from the API, or with "
            "--changed-policy discard to use the configured one"
        )


@dataclass
class Records:
    """The audit log and the policy file of one service; either may be missing."""

    log: AuditLog | None = None
    policy_file: PolicyFile | None = None
    restored: ChangedPolicy | None = None
    """The policy that counts since the start in place of the configured one."""

    def append(self, payloads: Sequence[JsonDict], kind: str = "report") -> None:
        if self.log is not None:
            self.log.append(payloads, kind)

    def problem(self) -> str:
        """Why the audit log cannot take a record now; empty if it can, or if there is none."""
        return "" if self.log is None else self.log.problem()

    def rotate(self) -> str:
        """Put the audit log aside and go on in a new file; returns the name of the old one."""
        if self.log is None:
            raise BadConfig("this service keeps no audit log: start it with --audit-log")
        return self.log.rotate().name

    def restore(self, configured: Policy, choice: str | None = None) -> Policy:
        """The policy to start with: the one that was changed over the API, or else the configured one."""
        self.restored = None if self.policy_file is None else self.policy_file.restore(configured, choice)
        return configured if self.restored is None else self.restored.policy

    def change_policy(self, policy: Policy, by: str, **more: str) -> None:
        """Keep a changed policy and log it, or raise and leave everything as it was."""
        before = None
        if self.policy_file is not None:
            before = self.policy_file.read()
            self.policy_file.write(policy, by)
        try:
            self.append([{**event_of(policy, by), **more}], kind="event")
        except BaseException:
            if self.policy_file is not None:
                self.policy_file.put(before)
            raise

    def note(self, policy: Policy, configured: Policy) -> str:
        """Where a policy comes from, and whether it outlasts a restart."""
        if policy == configured:
            return "as configured"
        if self.policy_file is not None:
            return "changed over the API; a restart keeps it"
        return "changed over the API; a restart goes back to the configured one (--state keeps changes)"


def event_of(policy: Policy, by: str) -> JsonDict:
    """The log's event for a changed policy."""
    return {"policy": policy.to_dict(), "policy_sha256": policy.digest(), "by": by}
