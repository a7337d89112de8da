"""`python -m allattn COMMAND` is `allattn COMMAND`."""

from allattn.commands.command_line import main

if __name__ == "__main__":
    main()
