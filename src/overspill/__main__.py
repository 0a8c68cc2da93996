"""`python -m overspill`: the command without its script on the PATH (systemd units name the interpreter)."""

from overspill.cli import main

if __name__ == "__main__":
    main()
