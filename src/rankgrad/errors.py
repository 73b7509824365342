"""The exceptions a caller may want to catch; everything else a user can do wrong is a ValueError."""


class InterruptedRunError(Exception):
    """The run was asked to stop, or lost a process, and has saved where it stands."""


class NonFiniteError(ValueError):
    """A step's loss or gradient was not finite; the weights are those of the step before."""


class OtherProcessError(Exception):
    """Another process of the run has failed and reported why; this one leaves quietly."""
