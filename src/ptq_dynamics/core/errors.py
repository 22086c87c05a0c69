"""The one exception that a person is meant to read."""


class UserError(Exception):
    """Bad input or a bad environment, told in one line: what (file, key, revision), why, and the fix.

    Entry points print the message without a traceback and exit with status 2. Any other exception
    is a bug of ours and keeps its traceback.
    """
