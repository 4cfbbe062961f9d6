"""The one exception of this package for what the caller has to change."""


class Refused(ValueError):
    """A request that would give wrong numbers, or none. The message says what to do instead."""
