"""Every error GuardPaint raises on purpose. Each message names the bad value and the way out."""


class GuardPaintError(Exception):
    """Base of all GuardPaint errors."""


class UnsupportedPipeline(GuardPaintError):
    """The pipeline class belongs to none of the supported families."""


class UnsupportedScheduler(GuardPaintError):
    """The scheduler is not supported: its noise levels are unknown, so clean estimates would be wrong."""


class BadConfig(GuardPaintError, ValueError):
    """A configuration or policy value is out of range or unknown."""


class BadCheckpoint(GuardPaintError):
    """Weights are missing, truncated, of the wrong shape or of the wrong kind."""


class BadInput(GuardPaintError, ValueError):
    """An image, prompt or file given by the user cannot be used."""


class TooLarge(BadInput):
    """A picture given by the user has more pixels or frames than are taken."""


class NotFinite(GuardPaintError):
    """A latent, view or score holds NaN or infinity."""


class GuardTimeout(GuardPaintError):
    """The guard spent longer on one image than `timeout_s` allows."""


class AuditLogError(GuardPaintError):
    """The audit log cannot be written or read, or does not verify."""


class MissingPackage(GuardPaintError):
    """An optional package that provides what was asked for is not installed."""


class BadPlugin(GuardPaintError):
    """An installed package registers something that cannot be loaded."""


class MissingCapability(GuardPaintError):
    """The testbed does not know what a command needs; the message names both."""


class NotKept(GuardPaintError):
    """A change could not be written where it would outlast a restart, so it was not made."""
