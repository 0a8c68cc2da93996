"""systemd units that serve models: what is in them, and putting them where systemd looks."""
