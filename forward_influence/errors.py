"""The one exception for what the caller has to fix: printed as a sentence, never as a traceback."""


class UserError(ValueError):
    """A request that cannot be met. The message names the value, what is allowed, and the next step."""


class NothingMeasured(UserError):
    """Everything was tried and all of it failed: the exit code is that of a run in which every document failed."""
