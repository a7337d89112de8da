"""Prune heads of a pretrained model: python prune.py checkpoint=PATH [setting=value ...], `allattn prune`."""

import sys

from allattn.commands.prune import COMMAND
from allattn.commands.run_command import run_command

if __name__ == "__main__":
    run_command(COMMAND, sys.argv[1:])
