"""The command line: allattn COMMAND [setting=value ...]."""

import difflib
import sys
from importlib import import_module

from allattn.commands.run_command import BAD_INPUT, Command, run_command
from allattn.commands.streams import end_output, make_output_last

COMMANDS = {  # each is the module of its name; it is imported when it is called
    "train": "pretrain an All-attention language model",
    "prune": "learn gates on a pretrained model, remove the closed heads, fine-tune",
    "prepare": "read, check and encode a text before a run needs it",
    "evaluate": "perplexity of a model, dense or pruned",
    "generate": "text that a model writes on from a prompt",
    "heads": "the heads that a model keeps and what that saves",
    "export": "a model as a Hugging Face folder",
    "remove": "a causal language model of others without its least active heads",
    "lm-eval": "a model on tasks of lm-evaluation-harness",
    "study": "which heads of a model do nothing, and what zeroing them costs",
    "compare": "pruning runs in one table, with pictures",
    "memory": "what training takes on a GPU, by calculation",
    "benchmark": "how fast the model is on this machine",
}


def main() -> None:
    """Run the command that the first argument names; without one, say what there is."""
    name, *arguments = sys.argv[1:] or ["--help"]
    if name in ("-h", "--help"):
        make_output_last()
        print(overview())
        end_output()
    elif name in COMMANDS:
        run_command(named_command(name), arguments)
    else:
        print(f"error: {no_such_command(name)}", file=sys.stderr)
        raise SystemExit(BAD_INPUT)


def named_command(name: str) -> Command:
    """The command of this name in `COMMANDS`."""
    found: Command = import_module(f"allattn.commands.{name.replace('-', '_')}").COMMAND
    return found


def overview() -> str:
    """What `allattn --help` prints."""
    lines = [f"  {name:<11}{purpose}" for name, purpose in COMMANDS.items()]
    return "\n".join(
        [
            "allattn COMMAND [setting=value ...]",
            "",
            *lines,
            "",
            "allattn COMMAND --help lists the command's settings and their values.",
        ]
    )


def no_such_command(name: str) -> str:
    """One line about a mistyped command, with the nearest right one."""
    near = difflib.get_close_matches(name.lower(), COMMANDS, 1)
    hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(COMMANDS)}"
    return f"there is no command {name}; {hint}"
