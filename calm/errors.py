"""What goes wrong by the user's doing, or the machine's: told in one line, without a traceback."""

NOT_FOUND = 127
NOT_EXECUTABLE = 126
USAGE = 2


class CalmError(Exception):
    """Ends the command with one line on standard error."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code
