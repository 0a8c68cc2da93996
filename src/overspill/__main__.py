"""`python -m overspill`: the command, where its script is not on the PATH (a systemd unit names the interpreter)."""

from overspill.cli import main

if __name__ == "__main__":
    main()
