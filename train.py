"""Pretrain an All-attention language model: python train.py [setting=value ...], which is `allattn train`."""

import sys

from allattn.commands.run_command import run_command
from allattn.commands.train import COMMAND

if __name__ == "__main__":
    run_command(COMMAND, sys.argv[1:])
