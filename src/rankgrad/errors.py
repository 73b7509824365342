"""The exceptions a caller may want to catch; everything else a user can do wrong is a ValueError."""


class InterruptedRunError(BaseException):
    """The run was asked to stop, or lost a process, and has saved where it stands.

    As a KeyboardInterrupt it is no `Exception`: a signal may come while any line is run, and what reads a file there would take
    it for damage.

    `status`: what the command ends with, 128 and the number of the signal, as a shell counts: 143 after SIGTERM.
    """

    def __init__(self, message: str = "", status: int = 130) -> None:
        super().__init__(message)
        self.status = status


class NonFiniteError(ValueError):
    """A step's loss or gradient was not finite; the weights are those of the step before."""


class OtherProcessError(Exception):
    """Another process of the run has failed and reported why; this one leaves quietly."""
