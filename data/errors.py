"""The one exception of this folder: a corpus that cannot be used as asked."""


class DataError(ValueError):
    """One sentence that names the value, what is allowed, and the next step."""
