"""What training looks like on a terminal and elsewhere."""

import math
import os
import re
import subprocess
from dataclasses import replace

import pytest
from cli_cases import COMMAND

from rankgrad.training.config import Config, Train


def _in_terminal(arguments, cwd, **environment):
    """Run the command with stdout and stderr on a terminal of 80 columns; all that it showed."""
    import fcntl
    import pty
    import struct
    import termios

    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    settings = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "COLUMNS")}
    settings |= {"TERM": "xterm-256color", **environment}
    process = subprocess.Popen([*COMMAND, *arguments], stdout=follower, stderr=follower, cwd=cwd, env=settings)
    os.close(follower)
    shown = b""
    while True:
        try:
            part = os.read(leader, 65_536)
        except OSError:  # how Linux says that the other end is closed
            break
        if not part:
            break
        shown += part
    os.close(leader)
    assert process.wait(60) == 0, shown
    return shown.decode()


@pytest.mark.slow
def test_a_terminal_gets_a_bar_that_fits_and_no_colour_where_none_is_wanted(data, tmp_path):
    arguments = ["train", str(data / "letor"), "--model", "linear", "--epochs", "3", "--batch-size", "4", "--out", "r"]
    shown = _in_terminal(arguments, tmp_path, NO_COLOR="1")
    assert not re.search(r"\x1b\[[0-9;]*[34]\d[0-9;]*m", shown)
    frames = [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line) for line in re.split(r"[\r\n]+", shown)]
    assert any(re.search(r"epoch 3/3 ━+ loss \S+ ndcg@10 \S+ \S+ lists/s 0:00:00", line) for line in frames)
    assert max(map(len, frames)) <= 80


def test_lines_tell_of_skipped_steps_early_stopping_and_a_resumed_start(capsys):
    from rankgrad.training.loop import Epoch, Step
    from rankgrad.training.progress import watch

    config = replace(Config(), train=Train(epochs=9, metric="map"))
    epoch = Epoch(epoch=5, loss=0.5, metric=0.25, best=False, lr=0.1, skipped=2, stop=False)
    events = [Step(4, 2, 3, 0.5, 8, 9), Step(4, 3, 3, 0.5, 8, 9), epoch, epoch._replace(epoch=6, stop=True)]
    watch(events, config)
    out, err = capsys.readouterr()
    first, last = err.splitlines()
    assert out == ""
    assert re.fullmatch(r"epoch 5/9  loss 0.5000  vali map 0.2500  2 steps skipped  [\d,]+ lists/s  0 s left", first)
    assert last.startswith("epoch 6/9 ")
    assert last.endswith("stopped early")
    watch(events, config, quiet=True)
    assert capsys.readouterr() == ("", "")
    watch([*events[:2], epoch._replace(loss=math.nan, skipped=1)], config)
    assert "  no step was taken  vali map 0.2500  1 step skipped  " in capsys.readouterr().err
