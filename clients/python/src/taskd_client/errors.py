"""The errors of this package, and the exceptions by which a handler rejects its task, or puts it off."""

from __future__ import annotations

from taskd_client._time import Seconds, seconds


class TaskdError(Exception):
    """The base of all errors of this package."""


class Unavailable(TaskdError):
    """taskd is away, or asked to try later. The same call may be repeated unchanged."""


class Unauthenticated(TaskdError):
    """taskd wants an access token, or this one is not valid."""


class PermissionDenied(TaskdError):
    """The access token does not allow the call."""


class InvalidRequest(TaskdError):
    """The call is wrong, and would be refused again."""


class NotFound(TaskdError):
    """taskd has no such task, or the token does not reach it."""


class Unsupported(TaskdError):
    """This taskd is older than the call, and does not know it."""


class TaskRejected(TaskdError):
    """taskd did not accept a new task, because it is wrong."""


class Unserialisable(TaskdError):
    """A payload or a result is of no type that can be sent."""


class PayloadError(TaskdError):
    """A payload does not have the type that its handler asks for."""


class EndOfSource(TaskdError):
    """The source has ended: the worker finishes what it has, and stops."""


class Reject(Exception):
    """Raised by a handler: the task cannot be done, and no further attempt would help.

    The rejection counts as `max_attempts` failures. A task for one worker becomes DEAD.
    """

    def __init__(self, reason: str = "") -> None:
        super().__init__(reason)
        self.reason = reason


class Retry(Exception):
    """Raised by a handler: another attempt shall be made, `after` so many seconds instead of the backoff."""

    def __init__(self, reason: str = "", *, after: Seconds | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.after = None if after is None else seconds(after)


class PutOff(Exception):
    """Raised by a handler: not now. The task comes again `after` so many seconds, and no failure counts.

    For a site that is busy. Without `after` the task comes again at once, or, after
    `Task.hold`, when the hold is over. Nothing bounds how often a task is put off, except its deadline. A taskd that is
    too old for this counts a failure.
    """

    def __init__(self, reason: str = "", *, after: Seconds | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.after = None if after is None else seconds(after)


class Throttle(PutOff):
    """Raised by a handler: not now, and nothing else for `after` so many seconds either.

    The task comes again then, at no cost as after `PutOff`, and until then the worker takes no tasks: for a service
    that every task needs and that is away or asks for a pause. Tasks that wait in the worker go to others at once.
    """

    def __init__(self, reason: str = "", *, after: Seconds) -> None:
        super().__init__(reason, after=after)
